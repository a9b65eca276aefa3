"""What a GGUF file with a draft model says of itself, and whether it fits a model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from pyctl.engine.draft.draft_settings import DraftSettings
from pyctl.engine.llama.devices import tensor_bytes

__all__ = ["with_inferred_type"]

log = logging.getLogger(__name__)


def with_inferred_type(drafts: DraftSettings) -> DraftSettings:
    """``drafts`` with the type of its file if it names none; without a draft model that has no file.

    A file with a head is for ``draft-mtp``, as in llama-server, any other for ``draft-simple``. Raises ModelError if it
    cannot be read.
    """
    types = drafts.ordered_types
    if drafts.draft_path and not types:
        has_head = any(name.endswith(".nextn.eh_proj.weight") for name in tensor_bytes(Path(drafts.draft_path)))
        types = ("draft-mtp" if has_head else "draft-simple",)
        log.info("%s is used for --spec-type %s", drafts.draft_path, types[0])
    elif "draft-simple" in types and not drafts.draft_path:
        log.error("--spec-type draft-simple needs a draft model: give --model-draft")
        types = tuple(name for name in types if name != "draft-simple")
    return replace(drafts, draft_types=types)
