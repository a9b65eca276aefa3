"""A live sequence: the tokens that llama.cpp holds under one sequence id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pyctl.cache.plan import ends_within
from pyctl.cache.snapshot import PromptFacts, Segment
from pyctl.prompt import Tokens, common_prefix

__all__ = ["LiveSequence"]

UNASKED = PromptFacts(asked=0)


@dataclass(eq=False)
class LiveSequence:
    """Tokens [0, n) of sequence ``id`` are evaluated; the state stands at n.

    ``ends`` are the batch ends of the exact part: batches that a cold run would evaluate. ``n_prompt`` is how many
    arrived as a prompt, with these ``facts``; the rest was generated. ``segment`` holds rows up to ``n_saved``; up to
    ``n_overlap`` some other snapshot may. A restore that is under way takes up to ``n_expected`` tokens.
    ``in_picture`` says that it ends inside an image, where it can go on but where nothing else can resume. ``shares``
    says that other sequences take cells, too, where that counts (`Scheduler.note_shared`): no batch is one of a cold
    run then, and loaded rows lie elsewhere.
    """

    id: int
    capacity: int
    n: int = 0
    ends: list[int] = field(default_factory=list)
    n_prompt: int = 0
    facts: PromptFacts = UNASKED
    segment: Segment | None = None
    n_saved: int = 0
    n_overlap: int = 0
    n_expected: int = 0
    in_picture: bool = False
    shares: bool = False

    def __post_init__(self) -> None:
        self._buffer: Tokens = np.empty(self.capacity, np.int32)

    @property
    def n_exact(self) -> int:
        """How many leading tokens came from batches that a cold run would evaluate."""
        return self.ends[-1] if self.ends else 0

    @property
    def tokens(self) -> Tokens:
        """The evaluated tokens, shape (n,); a view that the next change overwrites."""
        return self._buffer[: self.n]

    def shared(self, tokens: Tokens) -> int:
        """How many leading tokens it shares with ``tokens``."""
        return common_prefix(self.tokens, tokens)

    def append(self, tokens: Tokens, *, exact: bool) -> None:
        """Record that ``tokens`` of a prompt were evaluated at the end; ``exact`` if as a batch of a cold run."""
        if exact and not self.shares and self.n_exact == self.n:
            self.ends.append(self.n + int(tokens.size))
        self._buffer[self.n : self.n + tokens.size] = tokens
        self.n += int(tokens.size)
        self.n_prompt = self.n

    def append_one(self, token: int) -> None:
        """Record one generated token."""
        self._buffer[self.n] = token
        self.n += 1

    def truncate(self, n: int) -> None:
        """Record that nothing is evaluated from ``n`` on any more."""
        self.ends = list(ends_within(self.ends, 0, n))
        self.in_picture = self.in_picture and n == self.n
        self.n = n
        self.n_prompt = min(self.n_prompt, n)
        self.n_saved = min(self.n_saved, n)

    def reset(
        self, tokens: Tokens, *, ends: Sequence[int] = (), segment: Segment | None = None, n_saved: int = 0
    ) -> None:
        """Record that exactly ``tokens`` are evaluated now, up to ``ends[-1]`` in exact batches.

        ``segment`` and its parents hold the first ``n_saved`` of them.
        """
        self._buffer[: tokens.size] = tokens
        self.in_picture = False
        self.n = int(tokens.size)
        self.ends = [] if self.shares else list(ends)
        self.n_prompt = self.n
        self.keep(segment, n_saved)

    def keep(self, segment: Segment | None, n: int) -> None:
        """Record that ``segment`` and its parents hold the rows up to ``n``, or up to its end."""
        self.segment = segment
        self.n_saved = min(n, segment.end) if segment is not None else 0

    def saved(self) -> tuple[Segment | None, int]:
        """The deepest segment of these rows that is still kept, and up to which position it covers them."""
        segment, covered = self.segment, self.n_saved
        while segment is not None:
            if segment.alive and covered > segment.start:
                return segment, covered
            covered, segment = min(covered, segment.start), segment.parent
        return None, 0
