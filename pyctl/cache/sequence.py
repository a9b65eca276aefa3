"""A live sequence: the tokens that llama.cpp holds under one sequence id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pyctl.cache.positions import ReplySpans, clip_reply_spans, last_common_end
from pyctl.cache.snapshot import PromptFacts, Segment, Snapshot
from pyctl.prompt import Tokens, common_prefix

__all__ = ["Coverage", "LiveSequence"]

UNASKED = PromptFacts(turn=0)


class Coverage(NamedTuple):
    """The saved rows of a sequence.

    Attributes:
        segment: The deepest segment that has some of them, None if nothing is saved.
        n: The number of leading rows that ``segment`` and its ancestors have.
    """

    segment: Segment | None = None
    n: int = 0

    def clip(self, n: int) -> Coverage:
        """Return the coverage of the first ``n`` tokens."""
        return Coverage(self.segment, min(self.n, n))

    def alive(self) -> Coverage:
        """Return the part whose rows the cache still has."""
        segment, n = self
        while segment is not None and not (segment.alive and n > segment.start):
            n = min(n, segment.start)
            segment = segment.parent
        return Coverage(segment, n) if segment is not None else NOT_SAVED


NOT_SAVED = Coverage()


@dataclass(eq=False)
class LiveSequence:
    """The record of a sequence in llama.cpp: its tokens [0, n) are evaluated, and its state is at
    n.

    Attributes:
        id: The sequence id of llama.cpp.
        capacity: The maximum number of tokens.
        n: The number of evaluated tokens.
        batch_ends: The batch ends of the exact part, whose batches a cold run would also evaluate.
        reply_spans: The ranges of positions whose tokens it generated. A reply could have ended
            anywhere within them.
        facts: The facts of its prompt.
        covered: The rows that are saved.
        n_overlap: The number of leading rows that some other snapshot may also have.
        n_expected: The maximum number of tokens that a restore in progress takes.
        in_image: Whether it ends inside an image, where it can continue but nothing else can
            resume.
        shares: Whether other sequences take cells as well, where that counts
            (`Scheduler.mark_shared`). Then no batch is one of a cold run, and loaded rows lie in
            other cells.
    """

    id: int
    capacity: int
    n: int = 0
    batch_ends: list[int] = field(default_factory=list)
    reply_spans: ReplySpans = ()
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
        """The number of leading tokens from batches that a cold run would evaluate."""
        return self.batch_ends[-1] if self.batch_ends else 0

    @property
    def n_prompt(self) -> int:
        """The number of tokens before the reply at the end, or of all tokens if it ends without
        one.
        """
        first, last = self.reply_spans[-1] if self.reply_spans else (0, 0)
        return first if last == self.n else self.n

    @property
    def tokens(self) -> Tokens:
        """The evaluated tokens, shape (n,); a view that the next change overwrites."""
        return self._buffer[: self.n]

    def shared(self, tokens: Tokens) -> int:
        """Return how many leading tokens the sequence shares with ``tokens``, shape (n,)."""
        return common_prefix(self.tokens, tokens)

    def n_same_batches(self, batch_ends: Sequence[int], limit: int) -> int:
        """Return how many of the first ``limit`` rows came from the batches that end at
        ``batch_ends``.
        """
        return last_common_end(batch_ends, self.batch_ends, limit)

    def append(self, tokens: Tokens, *, exact: bool) -> None:
        """Record that ``tokens`` of a prompt, shape (n,), were evaluated at the end; ``exact`` if a
        cold run would evaluate the same batch.
        """
        if exact and not self.shares and self.n_exact == self.n:
            self.batch_ends.append(self.n + int(tokens.size))
        self._buffer[self.n : self.n + tokens.size] = tokens
        self.n += int(tokens.size)

    def append_one(self, token: int) -> None:
        """Record one generated token."""
        self._buffer[self.n] = token
        before = self.reply_spans
        if before and before[-1][1] == self.n:  # the reply grows
            before = before[:-1]
        self.reply_spans = (*before, (self.n_prompt, self.n + 1))
        self.n += 1

    def truncate(self, n: int) -> None:
        """Record that nothing is evaluated from ``n`` on."""
        self.in_image = self.in_image and n == self.n
        self.n = n
        self.covered = self.covered.clip(n)
        self.batch_ends = [end for end in self.batch_ends if end <= n]
        self.reply_spans = clip_reply_spans(self.reply_spans, 0, n)

    def resume(
        self, tokens: Tokens, batch_ends: Sequence[int], snapshot: Snapshot | None = None
    ) -> None:
        """Record that exactly ``tokens``, shape (n,), are evaluated now: the rows that were kept,
        then the rows of ``snapshot``. A cold run of their prompt has ``batch_ends``.
        """
        n = int(tokens.size)
        source = self if snapshot is None else snapshot
        n_exact = source.n_same_batches(batch_ends, n)
        covered = self.covered
        reply_spans = self.reply_spans
        if snapshot is not None:
            covered = Coverage(snapshot.segment, n)
            reply_spans += clip_reply_spans(snapshot.reply_spans, self.n, n)
        exact_ends = [end for end in batch_ends if end <= n_exact]
        self.reset(tokens, ends=exact_ends, reply_spans=reply_spans, covered=covered)

    def reset(
        self,
        tokens: Tokens,
        *,
        ends: Sequence[int] = (),
        reply_spans: ReplySpans = (),
        covered: Coverage = NOT_SAVED,
    ) -> None:
        """Record that exactly ``tokens`` are evaluated now, up to ``ends[-1]`` in exact batches."""
        self._buffer[: tokens.size] = tokens
        self.in_image = False
        self.n = int(tokens.size)
        self.batch_ends = [] if self.shares else list(ends)
        self.reply_spans = reply_spans
        self.covered = covered
