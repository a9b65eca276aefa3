"""Choosing of the values that follow from the model's files."""

from __future__ import annotations

import logging

from pyctl.llama.draft.draft_file import with_inferred_type
from pyctl.llama.fit.split import with_split
from pyctl.llama.library import extension
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.resolved import NO_DRAFTS, Resolved

__all__ = ["resolve"]

log = logging.getLogger(__name__)

CHOOSES_OWN_ROWS = "deepseek4"
"""The architecture whose indexer chooses among the rows of one sequence."""


def resolve(model: ModelSettings, drafts: DraftSettings = NO_DRAFTS) -> Resolved:
    """Return the settings with the values that follow from the machine and the model's files.

    The context, the layers on GPUs and the automatic drafts follow from free memory: see
    `pyctl.llama.fit.fitting`. Raises ModelError if a file cannot be read, or is not a draft model
    of the type that ``drafts`` name.
    """
    inferred = with_inferred_type(drafts)
    resolved = Resolved.from_settings(model, inferred).with_expert_batches()
    if inferred.draft_types != drafts.draft_types:
        resolved = resolved.with_drafts(
            inferred, "as the draft model's file and the extension allow"
        )
    resolved = _with_possible_sequences(resolved)
    split_mode = with_split(resolved.model, inferred, resolved.gpus).split_mode
    if split_mode != resolved.model.split_mode:
        resolved = resolved.chosen(
            "--split-mode", "llama.cpp cannot split this model by tensors", split_mode=split_mode
        )
    return resolved


def _with_possible_sequences(found: Resolved) -> Resolved:
    """Return the settings with one sequence where the cells of others would change a reply."""
    if extension.core is None:
        reason = "without the extension, the cells of other requests determine bits"
    elif _has_shared_indexer(found):
        reason = "the model's indexer would choose among the rows of all requests"
    else:
        return found
    if found.model.n_seqs == 1:
        return found
    if extension.core is not None:
        log.warning("one request at a time: %s", reason)
    return found.chosen("--parallel", reason, n_seqs=1)


def _has_shared_indexer(resolved: Resolved) -> bool:
    """Return whether an indexer of the model chooses among the cells of a context, so that a reply
    would depend on other sequences. Raises ModelError if the file cannot be read.
    """
    has_indexer = any(".indexer" in name for name in resolved.tensors)
    return has_indexer and resolved.file_head.arch != CHOOSES_OWN_ROWS
