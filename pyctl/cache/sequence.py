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

    ``ends`` are the batch ends of the exact part: batches that a cold run would evaluate.
    Within ``reply_spans`` it generated, so that a reply could have ended there. ``facts`` are its
    prompt's. Of the rows ``covered`` are saved; up to ``n_overlap`` some other snapshot may have
    them. A restore that is under way takes up to ``n_expected`` tokens. ``in_image``: it ends
    inside an image, where it can go on but nothing else can resume. ``shares``: other sequences
    take cells as well, if that counts (`Scheduler.mark_shared`): no batch is one of a cold run
    then, and loaded rows lie elsewhere.
    """

    id: int
    capacity: int
    n: int = 0
    ends: list[int] = field(default_factory=list)
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
        """How many leading tokens came from batches that a cold run would evaluate."""
        return self.ends[-1] if self.ends else 0

    @property
    def n_prompt(self) -> int:
        """How many tokens arrived as a prompt; the rest was generated."""
        first, last = self.reply_spans[-1] if self.reply_spans else (0, 0)
        return first if last == self.n else self.n

    @property
    def tokens(self) -> Tokens:
        """The evaluated tokens, shape (n,); a view that the next change overwrites."""
        return self._buffer[: self.n]

    def shared(self, tokens: Tokens) -> int:
        """How many leading tokens it shares with ``tokens``."""
        return common_prefix(self.tokens, tokens)

    def n_same_batches(self, batch_ends: Sequence[int], limit: int) -> int:
        """Return how many of its first ``limit`` rows are of the batches that end at
        ``batch_ends``.
        """
        return last_common_end(batch_ends, self.ends, limit)

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
        before = self.reply_spans
        if before and before[-1][1] == self.n:  # the reply grows
            before = before[:-1]
        self.reply_spans = (*before, (self.n_prompt, self.n + 1))
        self.n += 1

    def truncate(self, n: int) -> None:
        """Record that nothing is evaluated from ``n`` on."""
        self.in_image = self.in_image and n == self.n
        self.n = n
        self.covered = self.covered.within(n)
        self.ends = [end for end in self.ends if end <= n]
        self.reply_spans = clip_reply_spans(self.reply_spans, 0, n)

    def resume(
        self, tokens: Tokens, batch_ends: Sequence[int], snapshot: Snapshot | None = None
    ) -> None:
        """Record that exactly ``tokens`` are evaluated now: the rows of before, then the rows of
        ``snapshot``. A cold run of their prompt has ``batch_ends``.
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
        self.ends = [] if self.shares else list(ends)
        self.reply_spans = reply_spans
        self.covered = covered
