"""Snapshots of made-up rows, in RAM or on a device that exists only by name."""

from __future__ import annotations

import numpy as np

from pyctl.cache.snapshot import NOTHING, PromptMatch, Segment, Snapshot, State
from pyctl.prompt import as_tokens
from tests.unit.cache.fake_rows import FakeHeldRows

__all__ = ["ROW", "STATE", "n_bytes_of", "snapshot"]

STATE = 1000
"""Bytes of a state."""

ROW = 10
"""Bytes of a row; its token takes four more."""


def snapshot(
    seed: int,
    n: int,
    parent: Segment | None = None,
    *,
    has_rows: bool = True,
    is_held: bool = False,
) -> Snapshot:
    """Return a snapshot at ``n`` of the prompt ``seed``, with a segment after ``parent``. The
    rows are in RAM if it ``has_rows``, and on the device if it ``is_held``.
    """
    tokens = as_tokens(np.random.default_rng(seed).integers(0, 1000, n))
    start = parent.end if parent is not None else 0
    rows = np.zeros((n - start) * ROW, np.uint8) if has_rows else NOTHING
    segment = Segment(start, as_tokens(tokens[start:]), rows, parent)
    if is_held:
        segment.held = FakeHeldRows(n - start, (n - start) * ROW)
    state = State.from_parts(np.zeros(STATE, np.uint8))
    return Snapshot(PromptMatch(tokens).prefix(n), segment, state)


def n_bytes_of(n: int) -> int:
    """Return the bytes in RAM of a snapshot of ``n`` tokens."""
    return n * (ROW + 4) + STATE
