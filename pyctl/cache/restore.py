"""Restores a live sequence to the deepest possible position of a prompt, by the quickest way."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pyctl.cache.device_tier import DeviceTier
from pyctl.cache.disk.file_format import BlockSizes
from pyctl.cache.disk.readers import Reading
from pyctl.cache.plan import MIN_BATCH, ends_within, last_common_end, last_end
from pyctl.cache.ports import CacheRequest, MemoryShape, SequenceMemory, Store
from pyctl.cache.ram import RamCache
from pyctl.cache.recent import RecentMatches
from pyctl.cache.sequence import Coverage, LiveSequence
from pyctl.cache.snapshot import (
    Prefix,
    PromptFacts,
    PromptMatch,
    Segment,
    Snapshot,
    Source,
    State,
    stands_within,
)
from pyctl.errors import StateError
from pyctl.prompt import Tokens

if TYPE_CHECKING:
    from pyctl.cache.disk.arrival import Arrival

__all__ = [
    "CacheLookup",
    "CachePlan",
    "Candidate",
    "MakeRoom",
    "Ways",
    "coverage",
    "cut",
    "make_room_for",
    "publish",
    "quickest",
    "restore",
    "rows_in_memory",
]

log = logging.getLogger(__name__)

MakeRoom: TypeAlias = Callable[[int, int], bool]
"""Frees that many cells; so many of them may be where held rows lie already."""

SAME_SECONDS = 0.05
"""Of ways to resume whose times differ by less, the one that leaves fewer tokens to evaluate is
taken.
"""


@dataclass(frozen=True)
class Candidate:
    """A way to resume at ``n`` tokens: keep [0, ``keep``) of the live rows, take the rest from
    ``snapshot``.

    Without a snapshot nothing is copied: the live sequence is continued, or cut where the model
    allows it. With an ``arrival`` the snapshot still comes from disk.
    """

    source: Source
    n: int
    keep: int
    snapshot: Snapshot | None = None
    arrival: Arrival | None = None

    @property
    def has_state(self) -> bool:
        """Whether there is a state at ``n``: the model's or, where its rows suffice, what its draft
        model adds.
        """
        return (
            self.snapshot is not None
            and self.snapshot.n == self.n
            and bool(self.snapshot.state.parts)
        )


@dataclass(frozen=True, eq=False)
class CacheLookup:
    """The result of a lookup: the ways to resume in memory, deepest first, and the matches with
    recent prompts.

    ``ends`` are the batch ends of the prompt, ``facts`` those for the sequence. A request without
    the cache has no ways.
    """

    request: CacheRequest
    match: PromptMatch
    ends: Sequence[int]
    facts: PromptFacts
    ways: Sequence[Candidate] = ()
    recent: RecentMatches | None = None

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """The snapshots that may be restored."""
        return tuple(way.snapshot for way in self.ways if way.snapshot is not None)


@dataclass(frozen=True)
class CachePlan:
    """The plan for a prompt: end batches and take snapshots at ``cuts``, write those at ``persist``
    to disk.

    The prompt was ``restored`` from these snapshots, which stay locked meanwhile. The user's next
    turn resumes at ``turn``.
    """

    match: PromptMatch
    cuts: tuple[int, ...] = ()
    persist: tuple[int, ...] = ()
    restored: tuple[Snapshot, ...] = ()
    turn: int = 0


class Ways:
    """How ``prompt``, whose batches end at ``ends``, can resume in ``live``, before that changes.

    With ``exact`` only positions and rows count that a cold run would have produced. Else a prompt
    also resumes at the end of an earlier one and, if rows are all that it needs, within a reply,
    where that could have ended; raw text even wherever it changed. A chat gives up the bits of a
    cold run only for MIN_BATCH tokens, or if it is all there. With ``in_blocks`` no way ends within
    a batch or a reply: a client that must not read the texts of others could guess them token by
    token, by how many tokens were restored.
    """

    def __init__(
        self,
        prompt: PromptMatch,
        ends: Sequence[int],
        live: LiveSequence,
        shape: MemoryShape,
        *,
        exact: bool,
        in_blocks: bool = False,
    ) -> None:
        self._prompt = prompt
        self._ends = tuple(ends)
        self._live = live
        self._shape = shape
        self._exact = exact
        self._in_blocks = exact or in_blocks
        self._limit = int(prompt.tokens.size) - 1
        self._shared = live.shared(prompt.tokens)
        # Live rows that a cold run of this prompt would have evaluated in the same batches.
        self._same = last_common_end(ends, live.ends, self._shared)
        # How many of these ends lie before a segment, if they are on its chain, or -1.
        self._before: dict[Segment, int] = {}

    def find(self, cache: RamCache, *, may_end: bool = True) -> list[Candidate]:
        """All ways in memory, deepest first; one token at least stays to be evaluated, except where
        the very end of an equal prompt is known and ``may_end`` allows it.
        """
        live = self._live
        limit = self._limit
        shared = self._shared
        anywhere = self._prompt.is_raw and not self._in_blocks
        found: list[Candidate | None] = []
        if 0 < live.n == shared <= limit and (not self._exact or self._same == live.n):
            found.append(Candidate("live", live.n, live.n))
        elif self._shape.cut_anywhere:
            n = shared if anywhere and shared <= limit else self._last_stand(live, shared)
            found.append(Candidate("live", n, n))
        found += [self.at("ram", snapshot) for snapshot in cache.lookup(self._prompt, limit)]
        if self._shape.cut_anywhere and self._shape.has_rows:
            found.append(self._inside(*cache.overlap(self._prompt)))
        minimum = max((way.n for way in found if way is not None), default=0) + MIN_BATCH
        for end in cache.ends if may_end else ():
            if end.n == limit + 1 or (
                end.n <= limit and (anywhere or (end.n >= minimum and not self._exact))
            ):
                found.append(self._at_end(end))
        ways = [way for way in found if way is not None and way.n > 0]
        # Among equal ways, the live sequence comes first, then one that brings a state.
        stands = live.n
        return sorted(
            ways,
            key=lambda way: (
                -way.n,
                -way.keep,
                way.snapshot is not None or way.n != stands,
                not way.has_state,
            ),
        )

    def at(
        self, source: Source, snapshot: Snapshot, arrival: Arrival | None = None
    ) -> Candidate | None:
        """That at the end of ``snapshot``, with which the prompt starts; None if it were not
        exact.
        """
        n = snapshot.n
        if not self._shape.resume_points.allow(n):
            return None  # of a server whose ring had another size
        if self._exact and not (snapshot.exact and self.passes(snapshot)):
            # generated text, or batches of another prompt that end where this one's would not
            return None
        keep = self._shape.kept(last_end(self._ends, min(self._same, n)))
        return Candidate("live" if keep == n else source, n, keep, snapshot, arrival)

    def passes(self, snapshot: Snapshot) -> bool:
        """Whether a cold run of the prompt comes by the end of ``snapshot`` in the same batches;
        each segment is looked at once.
        """
        path: list[tuple[Segment, int]] = []
        for link in snapshot.links():
            path.append(link)
            if link[0] in self._before:
                break
        n = self._before.setdefault(path[-1][0], 0)
        for segment, last in reversed(path):
            self._before[segment] = n
            own = segment.ends[: bisect.bisect_right(segment.ends, last)]
            n = n + len(own) if n >= 0 and self._ends[n : n + len(own)] == own else -1
        return n > 0 and self._ends[n - 1] == snapshot.n

    def _inside(self, snapshot: Snapshot | None, reach: int) -> Candidate | None:
        """That inside the snapshot that shares most, where rows alone suffice."""
        if snapshot is None:
            return None
        n = self._last_stand(snapshot, reach)
        return Candidate("ram", n, last_end(self._ends, min(self._same, n)), snapshot)

    def _last_stand(self, rows: LiveSequence | Snapshot, shared: int) -> int:
        """The last common batch end of ``rows`` that share so much, or where a reply in them could
        have ended.
        """
        maximum = min(shared, self._limit)
        n = last_common_end(self._ends, rows.ends, maximum)
        minimum = n if shared > maximum else n + MIN_BATCH
        stands = stands_within(rows.stands, minimum, maximum) if not self._in_blocks else ()
        return stands[-1][1] if stands else n

    def _at_end(self, end: Snapshot) -> Candidate | None:
        """That at ``end``, the end of this prompt or of one before it; None if it were not
        exact.
        """
        is_same = end.exact and tuple(at for at in end.ends if at < end.n) == self._ends[:-1]
        if self._prompt.shared(end) != end.n or (self._exact and not is_same):
            return None
        # The last batch was also the same if the live sequence had this prompt and no other.
        is_own = (
            self._same == last_end(self._ends, end.n - 1)
            and self._live.n_prompt == self._shared == end.n
        )
        keep = self._shape.kept(end.n if is_own else last_end(self._ends, min(self._same, end.n)))
        return Candidate("live" if keep == end.n else "ram", end.n, keep, end)


def coverage(seq: LiveSequence, match: PromptMatch, cache: RamCache) -> Coverage:
    """The rows of ``seq`` that need not be saved: its own that are, or rows of a snapshot next to
    it.
    """
    if (covered := seq.covered.alive()).n < seq.n_overlap:
        other, shared = cache.overlap(match)
        common = (
            last_common_end(seq.ends, other.ends, min(shared, seq.n)) if other is not None else 0
        )
        if other is not None and common > covered.n:
            covered = seq.covered = Coverage(other.segment_at(common), common)
    return covered


def publish(
    arrival: Arrival, seq: LiveSequence, cache: RamCache, device: DeviceTier, disk: Store
) -> Reading[bool]:
    """Put a complete arrival from disk into RAM; False if there is no room or some of it never
    came.

    Rows that find no room stay only on the device, where ``seq`` has them.
    """
    disk.count_hit(arrival.snapshot)
    try:
        snapshot = yield from arrival.complete()
    except StateError as error:  # rows that the live sequence had already
        log.warning("cannot load all of a snapshot from disk: %s", error)
        return False
    if any(
        segment.dropped for segment in snapshot.chain
    ):  # shared with a snapshot that was dropped meanwhile
        return False
    device.hold(snapshot, seq)
    try:
        return cache.add(snapshot) or (device.leave_ram(snapshot) and cache.add(snapshot))
    finally:
        device.give_back(snapshot)


def rows_in_memory(prompt: PromptMatch, ends: Sequence[int], cache: RamCache) -> Snapshot | None:
    """The exact rows of ``prompt`` that ``cache`` has, as a snapshot without a state."""
    other, shared = cache.overlap(prompt)
    n = last_common_end(ends, other.ends, shared) if other is not None else 0
    return (
        Snapshot(prompt.prefix(n), other.segment_at(n), State())
        if other is not None and n
        else None
    )


def quickest(
    stored: Sequence[Prefix],
    ways: Sequence[Candidate],
    prompt: PromptMatch,
    base: Snapshot | None,
    disk: Store,
    sizes: BlockSizes,
) -> Prefix | None:
    """Which of the prefixes ``stored`` on disk to read, since no other way has the prompt evaluated
    earlier.

    Nothing is read of what ``base`` has. Of those that are about as quick as the quickest it is the
    deepest, but none that is also among the ``ways`` in memory.
    """
    costs = disk.costs
    n_prompt = int(prompt.tokens.size)
    covered = base.n if base is not None else 0

    def seconds(n: int, keep: int) -> float:
        return costs.load(sizes.n_bytes(n, keep)) + costs.evaluate(n, n_prompt)

    memory = {way.n: seconds(way.n, way.keep) for way in ways}
    times = {
        each: costs.read(sizes.n_bytes(each.n, covered)) + seconds(each.n, 0) for each in stored
    }
    limit = min([*memory.values(), *times.values(), costs.evaluate(0, n_prompt)]) + SAME_SECONDS
    minimum = max((n for n, each in memory.items() if each <= limit), default=0)
    return next(
        (prefix for prefix in stored if prefix.n > minimum and times[prefix] <= limit), None
    )


def cut(live: LiveSequence, n: int, memory: SequenceMemory) -> None:
    """Leave ``live`` the rows before ``n``, so that cells of the others are free; it needs the
    state at ``n`` next.
    """
    if n < live.n:
        memory.rewind(live.id, n)
        live.truncate(n)


def make_room_for(
    candidate: Candidate,
    snapshot: Snapshot,
    live: LiveSequence,
    lookup: CacheLookup,
    device: DeviceTier,
    make_room: MakeRoom,
) -> int:
    """Have cells for the rows that ``live`` has not got yet; how many of them lie on the device in
    their own.

    Those that RAM also has may be evicted for it, and need other cells then. If there are not
    enough, the other ways to resume may be given up.
    """
    if device.is_pool:
        with device.locked(*lookup.snapshots):
            device.vacate(live.n, candidate.n, snapshot)
        return device.n_ready(snapshot, live.n, candidate.n)
    n_ready = 0
    for staying in (lookup.snapshots, (snapshot,)):
        n_before = candidate.n + 1
        is_enough = True
        with device.locked(*staying):
            while (
                is_enough and (n_ready := device.n_ready(snapshot, live.n, candidate.n)) < n_before
            ):
                n_before = n_ready
                is_enough = make_room(candidate.n - live.n, n_ready)
        if is_enough:
            break
    return n_ready


def restore(
    candidate: Candidate,
    tokens: Tokens,
    ends: Sequence[int],
    live: LiveSequence,
    memory: SequenceMemory,
) -> Reading[bool]:
    """Make ``live`` hold the first ``candidate.n`` of ``tokens``; False leaves it empty, as does
    being closed.

    Bytes that do not fit are a miss: logged, never raised.
    """
    n = candidate.n
    keep = candidate.keep
    snapshot = candidate.snapshot
    try:
        if snapshot is None:
            if n < live.n:
                memory.rewind(live.id, n)
        else:
            cut(live, keep, memory)
            if candidate.arrival is not None:
                yield from _load_arriving(candidate.arrival, snapshot, keep, live, memory)
            else:
                memory.restore(
                    live.id,
                    keep,
                    snapshot.spans(keep, n),
                    snapshot.state if n == snapshot.n else None,
                )
    except StateError as error:
        log.warning("cannot restore the snapshot at %d tokens, evaluating instead: %s", n, error)
        memory.clear(live.id)
        live.reset(tokens[:0])
        return False
    except GeneratorExit:  # cancelled while the disk was read
        memory.clear(live.id)
        live.reset(tokens[:0])
        raise
    stands = stands_within(live.stands, 0, keep)
    if snapshot is None:
        n_exact = last_common_end(ends, live.ends, n)
        covered = live.covered.within(n)
    else:
        n_exact = last_common_end(ends, snapshot.ends, n)
        covered = Coverage(snapshot.segment, n)
        stands += stands_within(snapshot.stands, keep, n)
    live.reset(tokens[:n], ends=ends_within(ends, 0, n_exact), stands=stands, covered=covered)
    return True


def _load_arriving(
    arrival: Arrival, snapshot: Snapshot, at: int, live: LiveSequence, memory: SequenceMemory
) -> Reading[None]:
    """Append the rows from ``at`` on, segment by segment while the next are being read, and load
    the state.
    """
    if arrival.is_large:
        for segment, last in snapshot.chain.items():
            if last <= at:  # which is here, and need not be read, if it is not under way
                if arrival.has_begun(segment):
                    yield from arrival.rows(segment)
                _leave(arrival, segment, live, last, memory)
    while at < snapshot.n:
        segment = snapshot.segment_at(at + 1)
        yield from arrival.rows(segment)
        last = snapshot.chain[segment]
        memory.restore(live.id, at, snapshot.spans(at, last))
        if arrival.is_large:
            _leave(arrival, segment, live, last, memory)
        at = last
    yield from arrival.state()
    memory.restore(live.id, snapshot.n, (), snapshot.state)


def _leave(
    arrival: Arrival, segment: Segment, live: LiveSequence, last: int, memory: SequenceMemory
) -> None:
    """Let the device hold rows of ``segment``, which ``live`` has up to ``last`` now, instead of
    RAM.
    """
    if last == segment.end and segment.held is None and not segment.alive:
        segment.held = memory.hold(live.id, segment.start, last)
        arrival.free_rows(segment)
