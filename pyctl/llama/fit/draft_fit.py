"""Choosing of automatic drafts: the best that memory has room for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from pyctl.errors import ModelError
from pyctl.llama.fit.breakdown import tensor_layer
from pyctl.llama.fit.dry_runs import MemoryMeter
from pyctl.llama.fit.layer_fit import CpuShare
from pyctl.llama.library.devices import count_heads
from pyctl.llama.settings.draft_settings import PRIVATE, DraftSettings
from pyctl.llama.settings.memory_plan import MIB, MemoryPlan
from pyctl.llama.settings.resolved import Resolved

__all__ = ["DRAFT_CTX", "DraftChoice", "choose_drafts"]

DRAFT_CTX = 65_536
"""Minimum context with drafts that no flag selects: coding agents work in less, but not well."""


class DraftChoice(NamedTuple):
    """The drafts to use.

    Attributes:
        drafts: Their settings.
        reason: The reason for them.
        note: A line for the log, empty for none.
        plan: The memory with them, None if nothing drafts.
    """

    drafts: DraftSettings
    reason: str
    note: str = ""
    plan: MemoryPlan | None = None


def choose_drafts(meter: MemoryMeter) -> DraftChoice:
    """Return the sources that draft in place of the automatic drafts of the model of ``meter``: the
    head in its file and `cache`, one of them, or nothing.

    Drafts need memory, all layers on GPUs, and then room for the context, if none is given for
    `DRAFT_CTX` tokens. Each drafted token takes a state of each sequence; a draft of one is tried
    if longer ones take too much.
    """
    resolved = meter.resolved
    none = replace(resolved.drafts, draft_types=())
    if not resolved.gpus:
        return DraftChoice(none, "automatic drafts need a GPU")
    n_ctx = resolved.model.n_ctx
    lacking = ""
    for drafts in _possible_drafts(resolved):
        try:
            plan, n_ctx_train, _ = meter.measure(drafts, CpuShare())
        except ModelError as error:
            lacking = str(error)  # such as no memory for the states, which even a dry run allocates
            continue
        in_ram = plan.host.usage
        if in_ram.kv or in_ram.states:
            return DraftChoice(none, "automatic drafts need all of K and V on GPUs")
        minimum = n_ctx or min(DRAFT_CTX, n_ctx_train)
        # `cache` alone takes outputs and no states, so that it may come with a reduced context.
        is_small = drafts.draft_types == ("cache",) and not plan.n_state_history
        may_reduce = is_small and not n_ctx
        has_context = may_reduce or plan.n_ctx >= minimum
        if has_context and plan.fits:
            note = _note_of(drafts, plan, resolved.tensors)
            return DraftChoice(drafts, "automatic, as memory allows", note, plan)
        lacking = (
            f"{minimum:,} tokens of context do not fit with them; -np 1 or -ctk q8_0 -ctv "
            "q8_0 makes room"
        )
    if lacking:
        return DraftChoice(none, lacking, f"no drafts by default: {lacking}")
    return DraftChoice(none, "the model has no head")


def _possible_drafts(resolved: Resolved) -> Iterator[DraftSettings]:
    """Yield the default sources of drafts for the model of ``resolved``, the best first.

    Each drafted token of a head takes a state of each sequence, and so does the mark of longer
    drafts.
    """
    automatic = resolved.drafts
    texts = () if automatic.draft_types == PRIVATE else ("cache",)
    if not automatic.n_draft:
        return
    if count_heads(resolved.tensors) == 1:
        ways = [("draft-mtp", *texts)]
        if texts:
            ways.append(("draft-mtp",))
        for n_draft in sorted({automatic.n_draft, 1}, reverse=True):
            for draft_types in ways:
                yield replace(automatic, draft_types=draft_types, n_draft=n_draft)
    if texts:
        yield replace(automatic, draft_types=texts)


def _note_of(drafts: DraftSettings, plan: MemoryPlan, tensors: Mapping[str, int]) -> str:
    """Return the line for the log: the drafts, and the memory that they take."""
    names = ",".join(drafts.draft_types)
    note = f"drafts by default: --spec-type {names}, none turns them off"
    n_bytes = _draft_bytes(plan)
    if drafts.has("draft-mtp"):
        n_bytes += _head_weights(tensors)
        note += f"; the model's head drafts up to {drafts.n_draft} tokens a step"
    if n_bytes:
        note += f"; drafts take {n_bytes / MIB:,.0f} MiB"
    return note


def _draft_bytes(plan: MemoryPlan) -> int:
    """Return the bytes of rows, buffers and states that a model takes only because it drafts."""
    return sum(place.usage.drafts + place.usage.state_history for place in plan.places)


def _head_weights(tensors: Mapping[str, int]) -> int:
    """Return the bytes of the blocks of a model's own head."""
    blocks = {tensor_layer(name) for name in tensors if ".nextn." in name}
    return sum(size for name, size in tensors.items() if tensor_layer(name) in blocks)
