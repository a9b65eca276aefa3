"""What the cache holds: segments of rows that share their stem, and snapshots at which a prompt can be resumed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pyctl.cache.prefix import Prefix
from pyctl.prompt import Tokens

__all__ = ["NOTHING", "Block", "Segment", "Snapshot", "Span"]

Block: TypeAlias = NDArray[np.uint8]
"""Saved bytes, shape (size,), opaque to the cache."""

NOTHING: Block = np.empty(0, np.uint8)

Span: TypeAlias = tuple[Block, int, int]
"""Positions [first, last) out of a block of rows."""


@dataclass(eq=False)
class Segment:
    """The rows of tokens [start, start + len(tokens)), immutable, and the segment that covers what comes before.

    The parent may reach past ``start``; its rows from there on belong to another branch. ``ends`` are the batch ends in
    (start, end] that a cold run would have, too. ``references`` counts snapshots and children; only the cache that
    counts the bytes changes it, and sets ``dropped`` when it gives the rows up. A model without rows of its own
    (whole-sequence states) has segments of zero bytes: they still hold the tokens.
    """

    start: int
    tokens: Tokens
    rows: Block
    parent: Segment | None
    ends: tuple[int, ...] = ()
    references: int = 0
    dropped: bool = False

    @property
    def end(self) -> int:
        return self.start + int(self.tokens.size)

    @property
    def n_bytes(self) -> int:
        return int(self.rows.nbytes) + int(self.tokens.nbytes)

    @property
    def alive(self) -> bool:
        """Whether some snapshot still needs these rows."""
        return self.references > 0


@dataclass(eq=False)
class Snapshot:
    """Everything needed to resume at ``prefix.n`` tokens: a chain of segments over [0, n) and the state at n.

    ``state`` is empty for models that need only rows. ``exact`` says that every row and the state came from batches
    that a cold run would have evaluated. ``made`` and ``used`` are monotonic seconds.
    """

    prefix: Prefix
    segment: Segment
    state: Block
    exact: bool = True
    hits: int = 0
    made: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not self.segment.start < self.prefix.n <= self.segment.end:
            covered = f"[{self.segment.start}, {self.segment.end})"
            raise ValueError(f"a snapshot at {self.prefix.n} needs a segment that covers it, not {covered}")

    @property
    def n(self) -> int:
        return self.prefix.n

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole chain and the state, shared or not."""
        return sum(segment.n_bytes for segment in self.reach) + int(self.state.nbytes)

    @cached_property
    def reach(self) -> dict[Segment, int]:
        """Each segment of the chain with the position up to which it counts, from the deepest to the first."""
        return dict(self._chain())

    def _chain(self) -> Iterator[tuple[Segment, int]]:
        n, segment = self.n, self.segment
        while True:
            yield segment, min(n, segment.end)
            n = min(n, segment.start)
            while segment.parent is not None and n <= segment.start:
                segment = segment.parent
            if n <= segment.start:
                return

    def segment_at(self, n: int) -> Segment:
        """The segment that holds the row before position ``n``; ValueError outside (0, self.n]."""
        for segment, last in self.reach.items():
            if segment.start < n <= last:
                return segment
        raise ValueError(f"{n} is not in (0, {self.n}]")

    @property
    def ends(self) -> list[int]:
        """The exact batch ends of the whole chain, ascending."""
        stems = reversed(list(self.reach.items()))
        return [end for segment, last in stems for end in segment.ends if end <= last]

    def head(self, n: int) -> tuple[int, ...]:
        """The first ``n`` tokens, or fewer."""
        first, last = list(self.reach.items())[-1]
        return tuple(first.tokens[: min(n, last)].tolist())

    def tail(self, n: int) -> tuple[int, ...]:
        """The last ``n`` tokens, or fewer."""
        parts: list[Tokens] = []
        for segment, last in self.reach.items():
            parts.append(segment.tokens[: last - segment.start])
            if sum(part.size for part in parts) >= n:
                break
        return tuple(np.concatenate(parts[::-1])[-n:].tolist())

    def spans(self, first: int, last: int) -> list[Span]:
        """The rows [first, last) of the chain, in order."""
        result = []
        for segment, stop in self.reach.items():
            if stop > first and segment.start < last:
                result.append((segment.rows, max(first, segment.start), min(stop, last)))
        return result[::-1]
