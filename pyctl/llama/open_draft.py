"""Opening of the draft model or head that settings name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pyctl.llama.draft.block_model import BlockModel
from pyctl.llama.draft.draft_file import block_shape, check_target, vocabulary_difference
from pyctl.llama.draft.draft_model import Attach, DraftModel
from pyctl.llama.draft.mtp import Eagle3, MtpHead
from pyctl.llama.draft.separate_model import SeparateModel
from pyctl.llama.library.bindings import api
from pyctl.llama.library.file_digest import file_digest
from pyctl.llama.open_model import load_model, make_context
from pyctl.llama.settings.draft_settings import FEATURE_TYPES
from pyctl.llama.settings.params import (
    ModelParams,
    check_head,
    context_params,
    draft_cells,
    head_params,
)
from pyctl.llama.settings.resolved import Resolved

__all__ = ["open_draft"]

log = logging.getLogger(__name__)


def open_draft(resolved: Resolved, trunk: Any, trunk_ctx: Any, attach: Attach) -> DraftModel | None:
    """Return the draft model or head of ``resolved`` for the model ``trunk`` and its context, None
    without one.
    """
    if resolved.drafts.uses_file:
        return _open_file(resolved, trunk, trunk_ctx, attach)
    if resolved.drafts.uses_own_head:
        return _open_own_head(resolved, trunk, trunk_ctx, attach)
    return None


def _open_own_head(resolved: Resolved, trunk: Any, trunk_ctx: Any, attach: Attach) -> DraftModel:
    """Open the head in the file of the model ``trunk``."""
    head = resolved.head
    drafts = resolved.drafts
    params = head_params(head, trunk_ctx, resolved.model.n_ctx)
    ctx = make_context(trunk, head.model, params)
    try:
        return MtpHead(ctx, drafts.n_draft, p_min=drafts.draft_p_min, attach=attach)
    except BaseException:
        api.llama_free(ctx)
        raise


def _open_file(resolved: Resolved, trunk: Any, trunk_ctx: Any, attach: Attach) -> DraftModel | None:
    """Open the draft model or head in the file of ``resolved``; log and return None if its
    vocabulary differs.
    """
    draft = resolved.draft_file
    drafts = resolved.drafts
    path = Path(drafts.draft_path)
    layers: tuple[int, ...] = ()
    if drafts.has(*FEATURE_TYPES):
        layers = check_target(draft.file_head, drafts.draft_path, trunk)
    model = load_model(path, ModelParams(draft.model, with_head=drafts.has("draft-mtp")))
    ctx = None
    try:
        if drafts.has("draft-mtp"):
            check_head(model, trunk, drafts.draft_path)
        difference = vocabulary_difference(trunk, model)
        if difference:
            log.error("draft model %s disabled: %s", path, difference)
            api.llama_model_free(model)
            return None
        n_ctx = resolved.model.n_ctx
        if drafts.reads_rows:
            params = head_params(draft, trunk_ctx, n_ctx)
        else:
            params = context_params(draft, draft_cells(resolved, n_ctx))
        ctx = make_context(model, draft.model, params)
        return _draft_model(resolved, model, ctx, trunk, layers, attach)
    except BaseException:
        if ctx is not None:
            api.llama_free(ctx)
        api.llama_model_free(model)
        raise


def _draft_model(
    resolved: Resolved, model: Any, ctx: Any, trunk: Any, layers: tuple[int, ...], attach: Attach
) -> DraftModel:
    """Return the draft model of the type that ``resolved`` names; it owns ``model`` and ``ctx``."""
    drafts = resolved.drafts
    path = Path(drafts.draft_path)
    n_draft = drafts.n_draft
    options: dict[str, Any] = {
        "p_min": drafts.draft_p_min,
        "identity": file_digest(path),
        "attach": attach,
    }
    if drafts.has("draft-mtp"):
        return MtpHead(ctx, n_draft, model=model, **options)
    if drafts.has("draft-eagle3"):
        return Eagle3(ctx, n_draft, layers, model=model, **options)
    if layers:
        return BlockModel(ctx, n_draft, layers, block_shape(path), model=model, **options)
    n_vocab = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(trunk)))
    return SeparateModel(model, ctx, n_vocab, **options)
