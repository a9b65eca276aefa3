"""GGUF files of draft models: their type, and their compatibility with a model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as api

from pyctl.engine.draft.draft_settings import MODEL_TYPES, DraftSettings
from pyctl.llama.devices import check_gguf, tensor_bytes

__all__ = ["count_heads", "vocabulary_difference", "with_inferred_type"]

log = logging.getLogger(__name__)


def count_heads(path: Path) -> int:
    """Return the number of draft heads in the GGUF file ``path``. Raises ModelError if it cannot be read."""
    return sum(name.endswith(".nextn.eh_proj.weight") for name in tensor_bytes(path))


def with_inferred_type(drafts: DraftSettings) -> DraftSettings:
    """Return ``drafts`` with the type of its file if it names none, and at most one draft model type, unless automatic.

    A file with a head is ``draft-mtp``, as in llama-server, any other ``draft-simple``, which requires a file. Raises
    ModelError if the file cannot be read.
    """
    if drafts.is_automatic:
        return drafts
    types, path = drafts.ordered_types, drafts.draft_path
    if path:
        check_gguf(Path(path), "draft model")
    is_head = bool(path) and count_heads(Path(path)) > 0
    by_model = [name for name in MODEL_TYPES if name in types]
    if path and not types:
        types = ("draft-mtp" if is_head else "draft-simple",)
        log.info("draft model %s: --spec-type %s", path, types[0])
    elif "draft-simple" in types and not path:
        log.error("--spec-type draft-simple disabled: it requires --model-draft")
        types = tuple(name for name in types if name != "draft-simple")
    elif len(by_model) > 1:
        other = by_model[not is_head]
        log.warning("--spec-type %s disabled: only one draft model runs at a time", other)
        types = tuple(name for name in types if name != other)
    return replace(drafts, draft_types=types)


N_UNCOMPARED = 5
"""First tokens, mostly control tokens, whose texts may differ, as in llama-server."""

MOST_MORE_TOKENS = 128
"""Largest difference of the vocabulary sizes."""


def vocabulary_difference(model: Any, draft: Any) -> str:
    """Return how the vocabulary of the llama_model ``draft`` differs from that of ``model``; empty if it does not."""
    first, second = api.llama_model_get_vocab(model), api.llama_model_get_vocab(draft)
    if api.llama_vocab_type(first) != api.llama_vocab_type(second):
        return "its vocabulary is of another type"
    for name in ("bos", "eos"):
        adds, token = getattr(api, f"llama_vocab_get_add_{name}"), getattr(api, f"llama_vocab_{name}")
        if adds(first) != adds(second) or (adds(first) and token(first) != token(second)):
            return f"it has another {name.upper()} token"
    sizes = [int(api.llama_vocab_n_tokens(vocab)) for vocab in (first, second)]
    if max(sizes) - min(sizes) > MOST_MORE_TOKENS:
        return f"it has {sizes[1]} tokens, not {sizes[0]}"
    for token in range(N_UNCOMPARED, min(sizes)):
        texts = [api.llama_vocab_get_text(vocab, token) for vocab in (first, second)]
        if texts[0] != texts[1]:
            own, other = (text.decode("utf-8", "replace") for text in texts)
            return f"its token {token} is {other!r}, not {own!r}"
    return ""
