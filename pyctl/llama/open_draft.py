"""Opening of the draft model or head that settings name."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pyctl.llama.draft.block_model import BlockModel
from pyctl.llama.draft.draft_file import (
    DraftFile,
    block_shape,
    check_draft,
    vocabulary_difference,
)
from pyctl.llama.draft.draft_model import Attach, DraftModel
from pyctl.llama.draft.mtp import Eagle3, MtpHead
from pyctl.llama.draft.separate_model import SeparateModel
from pyctl.llama.library.bindings import api
from pyctl.llama.library.file_digest import file_digest
from pyctl.llama.open_model import load_model, make_context
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.params import ModelParams, context_params, draft_cells, head_params
from pyctl.llama.settings.resolved import Resolved

__all__ = ["open_draft"]

log = logging.getLogger(__name__)


def open_draft(resolved: Resolved, trunk: Any, trunk_ctx: Any, attach: Attach) -> DraftModel | None:
    """Return the draft model or head of ``resolved`` for the model ``trunk`` and its context; None
    without one, or if its vocabulary differs, which is logged.

    Raises ModelError if it cannot be opened, or cannot draft for this model.
    """
    drafts = resolved.drafts
    if not (drafts.uses_file or drafts.uses_own_head):
        return None
    draft = resolved.draft_file if drafts.uses_file else resolved.head
    params = _context_params(draft, trunk_ctx, resolved.model.n_ctx)
    with ExitStack() as undone:
        model = None  # the trunk has the head
        layers: tuple[int, ...] = ()
        if drafts.uses_file:
            model_params = ModelParams(draft.model, with_head=drafts.has("draft-mtp"))
            model = load_model(draft.path, model_params)
            undone.callback(api.llama_model_free, model)
            file = DraftFile(draft.model.path, draft.file_head, model)
            layers = check_draft(drafts, file, trunk)
            difference = vocabulary_difference(trunk, model)
            if difference:
                log.error("draft model %s disabled: %s", draft.path, difference)
                return None
        ctx = make_context(model or trunk, draft.model.lora, params)
        undone.callback(api.llama_free, ctx)
        draft_model = _draft_model(drafts, model, ctx, trunk, layers, attach)
        undone.pop_all()
    return draft_model


def _context_params(draft: Resolved, trunk_ctx: Any, n_ctx: int) -> Any:
    """Return a llama_context_params for the ``draft`` model or head, which follows the context
    ``trunk_ctx`` of ``n_ctx`` tokens.
    """
    if draft.drafts.reads_rows:
        return head_params(draft, trunk_ctx, n_ctx)
    return context_params(draft, draft_cells(draft, n_ctx))


def _draft_model(
    drafts: DraftSettings, model: Any, ctx: Any, trunk: Any, layers: tuple[int, ...], attach: Attach
) -> DraftModel:
    """Return the draft model of the type that ``drafts`` name; it owns ``ctx``, and ``model`` of
    their file, None without one.
    """
    path = Path(drafts.draft_path)
    n_draft = drafts.n_draft
    options: dict[str, Any] = {"p_min": drafts.draft_p_min, "attach": attach}
    if model is not None:
        options["model"] = model
        options["identity"] = file_digest(path)
    if drafts.has("draft-mtp"):
        return MtpHead(ctx, n_draft, **options)
    if drafts.has("draft-eagle3"):
        return Eagle3(ctx, n_draft, layers, **options)
    if layers:
        return BlockModel(ctx, n_draft, layers, block_shape(path), **options)
    n_vocab = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(trunk)))
    return SeparateModel(ctx=ctx, n_vocab=n_vocab, **options)
