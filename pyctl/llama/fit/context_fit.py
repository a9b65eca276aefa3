"""Choosing of a context size: arithmetic over the memory that a few sizes take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from pyctl.errors import ModelError
from pyctl.llama.settings.memory_plan import MIB, MemoryPlan

__all__ = [
    "CTX_STEP",
    "ContextRange",
    "PlanOf",
    "check_host",
    "fitting_context",
    "known_sum",
    "refusal",
    "whole_context",
]

CTX_STEP = 256
"""llama.cpp rounds contexts up to this."""

PlanOf: TypeAlias = Callable[[int], MemoryPlan]
"""The memory of a model as a function of its context size in tokens."""


@dataclass(frozen=True)
class ContextRange:
    """The context sizes among which to choose, in tokens.

    Attributes:
        given: The size that the user gave, 0 for none.
        n_ctx_train: The model's own size.
        least: The size below which no context is reduced.
        can_reduce: Whether a size that was not given may be reduced.
        memory_bytes: The bytes of all memories, None if one is unknown.
    """

    given: int
    n_ctx_train: int
    least: int
    can_reduce: bool
    memory_bytes: int | None

    @property
    def maximum(self) -> int:
        """The size that is wanted."""
        return self.given or self.n_ctx_train

    @property
    def minimum(self) -> int:
        """The smallest size that may be chosen in its place."""
        return min(self.least, self.maximum)


def known_sum(sizes: Iterable[int | None]) -> int | None:
    """Return the sum of ``sizes``, None if one is unknown."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


def fitting_context(plan_of: PlanOf, sizes: ContextRange) -> MemoryPlan:
    """Return the plan with the wanted context, or with the largest that fits if it may be reduced.

    Raises ModelError as `whole_context` does.
    """
    plan = whole_context(plan_of, sizes)
    maximum = sizes.maximum
    minimum = sizes.minimum
    can_reduce = sizes.can_reduce and not sizes.given and minimum < maximum
    if not can_reduce or plan.fits:
        return plan
    # Every part grows linearly with the context.
    low = plan_of(minimum)
    n_ctx = maximum
    for before, after in zip(low.places, plan.places, strict=True):
        if not after.missing:
            continue
        per_token = (after.usage.total - before.usage.total) / (maximum - minimum)
        fitting = maximum - int(after.missing / per_token) - 1 if per_token > 0 else minimum
        n_ctx = min(n_ctx, fitting)
    return plan_of(max(n_ctx // CTX_STEP * CTX_STEP, minimum))


def whole_context(plan_of: PlanOf, sizes: ContextRange) -> MemoryPlan:
    """Return the plan with the wanted context. Raises ModelError if its rows are larger than all
    memory.
    """
    maximum = sizes.maximum
    if maximum > sizes.n_ctx_train and sizes.memory_bytes is not None:
        # Even a dry run allocates data per cell, so far too large contexts are refused first.
        needed = plan_of(sizes.minimum).row_bytes * maximum
        if needed > sizes.memory_bytes:
            raise ModelError(refusal(maximum, int(needed), sizes.memory_bytes))
    return plan_of(maximum)


def check_host(plan: MemoryPlan) -> None:
    """Raise ModelError if the host lacks memory for ``plan``. Pages of a file need none."""
    host = plan.host
    if host.missing:
        mapped = host.usage.weights if host.is_mapped else 0
        raise ModelError(refusal(plan.n_ctx, host.usage.total - mapped, host.free or 0))


def refusal(n_ctx: int, needed: int, free: int) -> str:
    """Return the error message for a context that does not fit."""
    return (
        f"cannot make the context: {n_ctx} tokens need about {needed // MIB:,} MiB of memory and "
        f"there are {free // MIB:,} MiB; try a smaller --ctx-size"
    )
