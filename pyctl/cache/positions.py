"""Arithmetic on ascending positions in a prompt: batch ends, and the spans of replies."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["ReplySpans", "clip_reply_spans", "ends_within", "last_common_end", "last_end"]

ReplySpans: TypeAlias = tuple[tuple[int, int], ...]
"""The token counts between which each reply was generated, ascending: it could have ended at any of
them.
"""


def last_end(ends: Sequence[int], limit: int) -> int:
    """Return the deepest batch end at or before ``limit``, or 0."""
    n_ends = bisect.bisect_right(ends, limit)
    return ends[n_ends - 1] if n_ends else 0


def last_common_end(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """Return the deepest position at or before ``limit`` up to which both have the same batch ends,
    or 0.
    """
    n = min(bisect.bisect_right(a, limit), bisect.bisect_right(b, limit))
    if list(a[:n]) != list(b[:n]):  # which is seldom
        n = next(i for i in range(n) if a[i] != b[i])
    return a[n - 1] if n else 0


def ends_within(ends: Sequence[int], first: int, last: int | None = None) -> tuple[int, ...]:
    """Return the batch ends in (first, last], without ``last`` all after ``first``."""
    start = bisect.bisect_right(ends, first)
    if last is None:
        return tuple(ends[start:])
    return tuple(ends[start : bisect.bisect_right(ends, last)])


def clip_reply_spans(reply_spans: ReplySpans, first: int, last: int) -> ReplySpans:
    """Return the part of ``reply_spans`` in [first, last]."""
    clipped = ((max(low, first), min(high, last)) for low, high in reply_spans)
    return tuple((low, high) for low, high in clipped if low <= high)
