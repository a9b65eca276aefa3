"""The positions at which a prompt can resume: the live rows that each keeps, and where the rest
comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pyctl.cache.plan import MIN_BATCH
from pyctl.cache.ports import MemoryShape, SequenceMemory
from pyctl.cache.positions import clip_reply_spans, ends_within, last_end
from pyctl.cache.ram import RamCache
from pyctl.cache.reads import Reading
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import PromptMatch, Segment, Snapshot, Source

__all__ = ["SAME_SECONDS", "Candidate", "ResumeCandidates"]

SAME_SECONDS = 0.05
"""Seconds. Of candidates whose times differ by less, the one that leaves fewer tokens to evaluate
wins.
"""


@dataclass(frozen=True)
class Candidate:
    """A position to resume at.

    Attributes:
        origin: The tier that the rows after ``n_kept`` come from.
        n: The number of tokens at the position.
        n_kept: The number of live rows that stay.
        snapshot: The snapshot with the other rows. None if nothing is copied: the live sequence is
            continued, or cut where the model allows it.
    """

    origin: Source
    n: int
    n_kept: int
    snapshot: Snapshot | None = None

    @property
    def source(self) -> Source:
        """The source that statistics show: ``live`` if all rows stay."""
        return "live" if self.n_kept == self.n else self.origin

    @property
    def has_state(self) -> bool:
        """True if the snapshot has a state at ``n``: the model's or, where its rows suffice, its
        draft model's.
        """
        if self.snapshot is None or self.snapshot.n != self.n:
            return False
        return bool(self.snapshot.state.parts)

    def recheck(self, live: LiveSequence) -> Candidate | None:
        """Return the candidate as it can be loaded into ``live`` now; None if it cannot.

        An attempt before it may have failed, which drops a snapshot and leaves ``live`` empty; a
        snapshot may also have been evicted while the disk was read.
        """
        if self.snapshot is not None and self.snapshot.segment.dropped:
            return None
        if self.n_kept <= live.n:
            return self
        return replace(self, n_kept=0) if self.snapshot is not None else None

    def load(self, live: LiveSequence, memory: SequenceMemory) -> Reading[None]:
        """Append the rows of the snapshot to ``live``, which has ``n_kept`` rows, and load its
        state. Without a snapshot, cut ``live``.

        Yields nothing, since it waits for no read. Raises StateError if the bytes do not fit the
        model, OutOfCellsError without room.
        """
        if self.snapshot is not None:
            state = self.snapshot.state if self.n == self.snapshot.n else None
            memory.restore(live.id, self.n_kept, self.snapshot.spans(self.n_kept, self.n), state)
        elif self.n < live.n:
            memory.rewind(live.id, self.n)
            live.truncate(self.n)
        yield from ()

    def enter(self, live: LiveSequence) -> Reading[bool]:
        """Put the snapshot into RAM, now that ``live`` has its rows; return False if that is
        impossible.
        """
        yield from ()
        return True

    def discard(self, cache: RamCache) -> None:
        """Drop the snapshot, whose bytes do not fit the model."""
        if self.snapshot is not None:
            cache.drop(self.snapshot)

    def close(self) -> None:
        """End the reads of a candidate that is no longer tried."""


class ResumeCandidates:
    """The places where ``prompt``, whose batches end at ``batch_ends``, can resume in ``live``.

    ``live`` may not change between the construction and the last call. With ``exact`` only
    positions and rows count that a cold run would have produced. Else a prompt also resumes at the
    end of an earlier one and, if the model needs only rows, within a reply, which could have ended
    there; raw text even wherever it changed. A chat gives up the bits of a cold run only for
    MIN_BATCH tokens, or if the whole prompt is there. With ``in_blocks`` no candidate ends within a
    batch or a reply: a client that must not read the texts of others could guess them token by
    token, by how many tokens were restored.
    """

    def __init__(
        self,
        prompt: PromptMatch,
        batch_ends: Sequence[int],
        live: LiveSequence,
        shape: MemoryShape,
        *,
        exact: bool,
        in_blocks: bool = False,
    ) -> None:
        """Compare ``prompt``, whose batches end at ``batch_ends``, with the tokens of ``live``."""
        self._prompt = prompt
        self._batch_ends = tuple(batch_ends)
        self._live = live
        self._shape = shape
        self._exact = exact
        self._in_blocks = exact or in_blocks
        self._cuts_raw_text = prompt.is_raw and not self._in_blocks
        # One token at least is evaluated, since only that yields an output.
        self._limit = int(prompt.tokens.size) - 1
        self._n_same_tokens = live.shared(prompt.tokens)
        # Live rows that a cold run of this prompt would have evaluated in the same batches.
        self._n_same_batches = live.n_same_batches(batch_ends, self._n_same_tokens)
        # How many of the prompt's batch ends lie before a segment; None if its chain has others.
        self._n_ends_before: dict[Segment, int | None] = {}

    def find(self, cache: RamCache, *, may_end: bool = True) -> list[Candidate]:
        """Return all candidates in memory, the preferred first.

        One token at least stays to be evaluated, except where the output at the end of an equal
        prompt is cached and ``may_end`` allows to use it.
        """
        candidates = [
            *self._from_live_rows(),
            *self._from_snapshots(cache.lookup(self._prompt, self._limit)),
            *self._from_overlap(cache),
        ]
        if may_end:
            deepest = max((candidate.n for candidate in candidates), default=0)
            candidates += self._from_prompt_ends(cache.prompt_ends, deepest)
        return sorted(candidates, key=self._preference)

    def from_snapshot(self, origin: Source, snapshot: Snapshot) -> Candidate | None:
        """Return the candidate at the end of ``snapshot``, which holds a prefix of the prompt; None
        if it cannot be resumed, or not exactly.
        """
        n = snapshot.n
        if not self._shape.resume_points.contains(n):
            return None  # it was saved by a server whose window had another size
        if self._exact and not (snapshot.exact and self.has_same_batches(snapshot)):
            # generated text, or batches of another prompt that end where this one's would not
            return None
        return Candidate(origin, n, self._n_kept(n), snapshot)

    def has_same_batches(self, snapshot: Snapshot) -> bool:
        """Return whether a cold run of the prompt reaches the end of ``snapshot`` by the same
        batches. Each segment is compared once, however many snapshots share it.
        """
        uncompared: list[tuple[Segment, int]] = []
        for segment, upto in snapshot.iter_chain():
            uncompared.append((segment, upto))
            if segment in self._n_ends_before:
                break
        n_ends = self._n_ends_before.setdefault(uncompared[-1][0], 0)
        for segment, upto in reversed(uncompared):
            self._n_ends_before[segment] = n_ends
            n_ends = self._count_same_ends(n_ends, segment, upto)
        if not n_ends:
            return False
        return self._batch_ends[n_ends - 1] == snapshot.n

    def _count_same_ends(self, n_before: int | None, segment: Segment, upto: int) -> int | None:
        """Return how many batch ends the prompt has before ``upto``, with ``n_before`` before
        ``segment``; None if the segment has others.
        """
        if n_before is None:
            return None
        segment_ends = ends_within(segment.batch_ends, 0, upto)
        n_ends = n_before + len(segment_ends)
        return n_ends if self._batch_ends[n_before:n_ends] == segment_ends else None

    def _from_live_rows(self) -> Iterator[Candidate]:
        """Yield the live sequence itself: as it is, or cut before the first token that differs."""
        n_live = self._live.n
        n_shared = self._n_same_tokens
        is_prefix = 0 < n_live == n_shared <= self._limit
        if is_prefix and (not self._exact or self._n_same_batches == n_live):
            yield Candidate("live", n_live, n_live)
            return
        if not self._shape.cut_anywhere:
            return
        if self._cuts_raw_text and n_shared <= self._limit:
            n = n_shared
        else:
            n = self._last_position(self._live, n_shared)
        if n:
            yield Candidate("live", n, n)

    def _from_snapshots(self, snapshots: Iterable[Snapshot]) -> Iterator[Candidate]:
        """Yield the ends of ``snapshots``, which hold prefixes of the prompt."""
        for snapshot in snapshots:
            candidate = self.from_snapshot("ram", snapshot)
            if candidate is not None:
                yield candidate

    def _from_overlap(self, cache: RamCache) -> Iterator[Candidate]:
        """Yield a position within the snapshot that shares the most tokens, where rows suffice."""
        if not (self._shape.cut_anywhere and self._shape.has_rows):
            return
        snapshot, n_shared = cache.overlap(self._prompt)
        if snapshot is None:
            return
        n = self._last_position(snapshot, n_shared)
        if n:
            yield Candidate("ram", n, self._n_kept(n), snapshot)

    def _from_prompt_ends(
        self, prompt_ends: Iterable[Snapshot], deepest: int
    ) -> Iterator[Candidate]:
        """Yield each of ``prompt_ends`` that this prompt equals or starts with; all other
        candidates are at ``deepest`` or before.
        """
        for end in prompt_ends:
            if self._is_worth_an_end(end.n, deepest) and self._has_end(end):
                yield Candidate("ram", end.n, self._n_kept_at_end(end.n), end)

    def _is_worth_an_end(self, n: int, deepest: int) -> bool:
        """Return whether to resume at the end of a prompt of ``n`` tokens, if it is a prefix of
        this one, rather than at ``deepest``: batches after it differ from a cold run's.
        """
        if n > self._limit:
            return n == self._limit + 1  # the whole prompt, of which nothing is left to evaluate
        return self._cuts_raw_text or (n >= deepest + MIN_BATCH and not self._exact)

    def _has_end(self, end: Snapshot) -> bool:
        """Return whether the prompt starts with all of ``end``; with `exact`, in the batches of a
        cold run.
        """
        if self._prompt.shared(end) != end.n:
            return False
        if not self._exact:
            return True
        inner_ends = tuple(at for at in end.batch_ends if at < end.n)
        return end.exact and inner_ends == self._batch_ends[:-1]

    def _n_kept(self, n: int) -> int:
        """Return how many live rows stay where a snapshot of ``n`` tokens is loaded."""
        return self._shape.n_kept_rows(last_end(self._batch_ends, min(self._n_same_batches, n)))

    def _n_kept_at_end(self, n: int) -> int:
        """Return how many live rows stay where the end of a prompt of ``n`` tokens is loaded."""
        is_last_batch_live = self._n_same_batches == last_end(self._batch_ends, n - 1)
        has_no_other = self._live.n_prompt == self._n_same_tokens == n
        # If the live sequence had this prompt and no other, its last batch was also the same.
        return (
            self._shape.n_kept_rows(n) if is_last_batch_live and has_no_other else self._n_kept(n)
        )

    def _last_position(self, rows: LiveSequence | Snapshot, n_shared: int) -> int:
        """Return the last position within ``n_shared`` tokens of ``rows`` at which the prompt can
        resume: a common batch end or, MIN_BATCH tokens after it, where a reply could have ended.
        """
        maximum = min(n_shared, self._limit)
        batch_end = rows.n_same_batches(self._batch_ends, maximum)
        if self._in_blocks:
            return batch_end
        minimum = batch_end if n_shared > maximum else batch_end + MIN_BATCH
        spans = clip_reply_spans(rows.reply_spans, minimum, maximum)
        return spans[-1][1] if spans else batch_end

    def _preference(self, candidate: Candidate) -> tuple[int, int, bool, bool]:
        """Return the key by which candidates are sorted: the deepest first; of equal ones the one
        that keeps the most live rows, copies nothing, and brings a state.
        """
        needs_copy = candidate.snapshot is not None or candidate.n != self._live.n
        return -candidate.n, -candidate.n_kept, needs_copy, not candidate.has_state
