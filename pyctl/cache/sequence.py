"""A live sequence: the tokens that llama.cpp holds under one sequence id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pyctl.cache.plan import ends_within
from pyctl.cache.snapshot import PromptFacts, Segment, Stands, stands_within
from pyctl.prompt import Tokens, common_prefix

__all__ = ["Coverage", "LiveSequence"]

UNASKED = PromptFacts(turn=0)


class Coverage(NamedTuple):
    """The first ``n`` rows of a sequence are in ``segment`` and its parents; without a segment none
    are.
    """

    segment: Segment | None = None
    n: int = 0

    def within(self, n: int) -> Coverage:
        """The prefix of the first ``n`` tokens."""
        return Coverage(self.segment, min(self.n, n))

    def alive(self) -> Coverage:
        """The part that is still kept."""
        segment, n = self
        while segment is not None and not (segment.alive and n > segment.start):
            n = min(n, segment.start)
            segment = segment.parent
        return Coverage(segment, n) if segment is not None else NOT_SAVED


NOT_SAVED = Coverage()


@dataclass(eq=False)
class LiveSequence:
    """Tokens [0, n) of sequence ``id`` are evaluated; the state stands at n.

    ``ends`` are the batch ends of the exact part: batches that a cold run would evaluate. It stood
    at ``stands`` while it generated, so that a reply could have ended there. ``facts`` are its
    prompt's. Of the rows ``covered`` are saved; up to ``n_overlap`` some other snapshot may have
    them. A restore that is under way takes up to ``n_expected`` tokens. ``in_image``: it ends
    inside an image, where it can go on but nothing else can resume. ``shares``: other sequences
    take cells as well, if that counts (`Scheduler.note_shared`): no batch is one of a cold run
    then, and loaded rows lie elsewhere.
    """

    id: int
    capacity: int
    n: int = 0
    ends: list[int] = field(default_factory=list)
    stands: Stands = ()
    facts: PromptFacts = UNASKED
    covered: Coverage = NOT_SAVED
    n_overlap: int = 0
    n_expected: int = 0
    in_image: bool = False
    shares: bool = False

    def __post_init__(self) -> None:
        self._buffer: Tokens = np.empty(self.capacity, np.int32)

    @property
    def n_exact(self) -> int:
        """How many leading tokens came from batches that a cold run would evaluate."""
        return self.ends[-1] if self.ends else 0

    @property
    def n_prompt(self) -> int:
        """How many tokens arrived as a prompt; the rest was generated."""
        first, last = self.stands[-1] if self.stands else (0, 0)
        return first if last == self.n else self.n

    @property
    def tokens(self) -> Tokens:
        """The evaluated tokens, shape (n,); a view that the next change overwrites."""
        return self._buffer[: self.n]

    def shared(self, tokens: Tokens) -> int:
        """How many leading tokens it shares with ``tokens``."""
        return common_prefix(self.tokens, tokens)

    def append(self, tokens: Tokens, *, exact: bool) -> None:
        """Record that ``tokens`` of a prompt were evaluated at the end; ``exact`` if as a batch of
        a cold run.
        """
        if exact and not self.shares and self.n_exact == self.n:
            self.ends.append(self.n + int(tokens.size))
        self._buffer[self.n : self.n + tokens.size] = tokens
        self.n += int(tokens.size)

    def append_one(self, token: int) -> None:
        """Record one generated token."""
        self._buffer[self.n] = token
        before = self.stands[:-1] if self.stands and self.stands[-1][1] == self.n else self.stands
        self.stands = (*before, (self.n_prompt, self.n + 1))
        self.n += 1

    def truncate(self, n: int) -> None:
        """Record that nothing is evaluated from ``n`` on."""
        self.ends = list(ends_within(self.ends, 0, n))
        self.in_image = self.in_image and n == self.n
        self.n = n
        self.stands = stands_within(self.stands, 0, n)
        self.covered = self.covered.within(n)

    def reset(
        self,
        tokens: Tokens,
        *,
        ends: Sequence[int] = (),
        stands: Stands = (),
        covered: Coverage = NOT_SAVED,
    ) -> None:
        """Record that exactly ``tokens`` are evaluated now, up to ``ends[-1]`` in exact batches."""
        self._buffer[: tokens.size] = tokens
        self.in_image = False
        self.n = int(tokens.size)
        self.ends = [] if self.shares else list(ends)
        self.stands = stands
        self.covered = covered
