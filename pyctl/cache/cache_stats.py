"""Statistics of the cache for one request and since the start, and views of its contents for
clients.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Literal, TypeAlias
from weakref import WeakKeyDictionary

from pyctl.cache.plan import MIN_SHARED
from pyctl.cache.ports import DiskView, Store
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Segment, Snapshot, Source
from pyctl.prompt import Tokens

__all__ = [
    "SHOWN",
    "CacheStats",
    "CacheView",
    "Divergence",
    "KnownParts",
    "LiveView",
    "RequestStats",
    "SnapshotView",
    "view_of",
]

CONTEXT = 12
"""Tokens shown on each side of a difference."""


@dataclass(frozen=True)
class Divergence:
    """Where the prompt leaves the nearest recent one, and what could be restored before that.

    ``position`` is the first token that differs, ``nearest`` the position that was resumed at
    instead (0 for none). ``recent`` and ``given`` are the tokens around the difference, CONTEXT of
    them on each side at most, as the recent prompt had them and as this one does.
    """

    position: int
    nearest: int
    recent: tuple[int, ...] = ()
    given: tuple[int, ...] = ()

    @property
    def is_by_chance(self) -> bool:
        """Whether no more was lost than prompts share that have nothing to do with each other, such
        as a title's.
        """
        return self.position - self.nearest < MIN_SHARED

    @classmethod
    def at(cls, position: int, nearest: int, recent: Tokens, given: Tokens) -> Divergence:
        """A divergence with the tokens around ``position``."""
        around = slice(max(position - CONTEXT, 0), position + CONTEXT)
        return cls(position, nearest, tuple(recent[around].tolist()), tuple(given[around].tolist()))


@dataclass
class RequestStats:
    """One request's account. Counts are tokens, times are milliseconds.

    ``n_prompt == n_cached + n_evaluated`` once the prefill has ended; ``n_saved`` counts snapshots
    taken. ``save_ms`` includes the wait for the batch that the device was still computing. Of the
    cached, ``n_prewarmed`` tokens had been evaluated for this request before it came. ``restored``
    is the id of the snapshot that was resumed from, empty without one, ``saved`` are the ids of the
    snapshots taken.
    """

    n_prompt: int
    source: Source = "none"
    n_cached: int = 0
    n_evaluated: int = 0
    n_saved: int = 0
    lookup_ms: float = 0.0
    restore_ms: float = 0.0
    save_ms: float = 0.0
    miss: Divergence | None = field(default=None)
    n_prewarmed: int = 0
    restored: str = ""
    saved: list[str] = field(default_factory=list)

    @staticmethod
    def now() -> float:
        """Return the time in seconds, from any start."""
        return time.perf_counter()

    @contextmanager
    def timed(self, name: Literal["lookup_ms", "restore_ms", "save_ms"]) -> Iterator[None]:
        """Add the time of the block to the field ``name``, whatever ends the block."""
        began = self.now()
        try:
            yield
        finally:
            ms = (self.now() - began) * 1e3
            setattr(self, name, getattr(self, name) + ms)

    def count_saved(self, name: str) -> None:
        """A snapshot was taken, under this id."""
        self.n_saved += 1
        self.saved.append(name)


@dataclass
class CacheStats:
    """Sums over all requests since the start; counts of tokens unless the name shows another unit.

    Background requests count only in ``n_prewarms`` (prompts) and ``n_prewarmed`` (evaluated
    tokens); requests resumed from ``n_prewarmed_used`` of these tokens.
    """

    requests: int = 0
    n_prompt: int = 0
    n_evaluated: int = 0
    n_predicted: int = 0
    n_cached: dict[Source, int] = field(default_factory=lambda: {"live": 0, "ram": 0, "disk": 0})
    hits: dict[Source, int] = field(default_factory=lambda: {"live": 0, "ram": 0, "disk": 0})
    n_saved: int = 0
    failed_restores: int = 0
    n_prewarmed: int = 0
    n_prewarms: int = 0
    n_prewarmed_used: int = 0
    saved_seconds: float = 0.0

    def add(self, stats: RequestStats, n_predicted: int, saved_seconds: float) -> None:
        """Count a finished request."""
        self.requests += 1
        self.n_prompt += stats.n_prompt
        self.n_evaluated += stats.n_evaluated
        self.n_predicted += n_predicted
        self.saved_seconds += saved_seconds
        self.n_saved += stats.n_saved
        if stats.source != "none":
            self.n_cached[stats.source] += stats.n_cached
            self.hits[stats.source] += 1


SHOWN = 24

"""Tokens shown of the end of each prefix, and of the beginning of what it adds to the one before.
"""

Tier: TypeAlias = Literal["device", "ram", "disk"]

"""Where something of a snapshot lies."""


@dataclass(frozen=True)
class SnapshotView:
    """One snapshot. ``id`` names its prefix; ``parent`` is the id of the deepest shorter prefix of
    it, or empty.

    ``n`` is in tokens, ``row_bytes`` what it adds to its parent in RAM, ``device_bytes`` on the
    device, ``age`` and ``idle`` seconds since it was made and since its last hit. ``tail`` are the
    last tokens of the prefix, ``head`` the first that its parent has not. ``tiers`` are where it
    lies: what it adds, or its state. ``shared`` are the tokens whose rows it shares with the one
    before it of the same parent, at least the parent's, in an order in which those that share most
    are neighbours (`view_of`): where branches part, whether or not there is a snapshot.
    """

    id: str
    parent: str
    n: int
    row_bytes: int
    state_bytes: int
    hits: int
    age: float
    idle: float
    pinned: bool
    tail: tuple[int, ...]
    head: tuple[int, ...] = ()
    device_bytes: int = 0
    tiers: tuple[Tier, ...] = ("ram",)
    shared: int = 0


@dataclass(frozen=True)
class LiveView:
    """A live sequence that holds ``n`` tokens. ``at`` is the id of the deepest snapshot of these,
    empty for none. ``task`` is the id of the request that runs on it, -1 for none.
    """

    id: int
    n: int
    busy: bool
    at: str
    tail: tuple[int, ...]
    task: int = -1


@dataclass(frozen=True)
class CacheView:
    """Everything at one moment. ``budget`` is in bytes, -1 for no limit; ``n_refused`` snapshots
    were beyond it. Beside ``snapshots`` there are ``n_ends`` prompt ends.

    ``revision`` is another, higher number as soon as anything of this is different.
    """

    n_slots: int
    n_bytes: int
    budget: int
    n_evicted: int
    totals: CacheStats
    snapshots: tuple[SnapshotView, ...]
    disk: DiskView | None = None
    n_refused: int = 0
    live: tuple[LiveView, ...] = ()
    revision: int = 0
    n_ends: int = 0


_Steps: TypeAlias = tuple[tuple[int, int], ...]
"""Segments, by their ids, each with the position up to which a snapshot has it."""


@dataclass(frozen=True)
class SnapshotDelta:
    """The part of a snapshot after its parent's ``n_parent`` tokens: segments with their positions,
    ascending, and the tokens of its label.
    """

    n_parent: int
    spans: tuple[tuple[Segment, int, int], ...]
    steps: _Steps
    head: tuple[int, ...]
    tail: tuple[int, ...]

    @classmethod
    def of(cls, snapshot: Snapshot, n_parent: int) -> SnapshotDelta:
        """Return the delta of ``snapshot``, at the cost of its new part."""
        spans = []
        for segment, last in snapshot.links():
            if last <= n_parent:
                break
            spans.append((segment, max(segment.start, n_parent), last))
        spans = [(link, min(first, stop), stop) for (link, first, stop) in reversed(spans)]
        head: list[int] = []
        for segment, first, last in spans:
            part = segment.tokens[
                first - segment.start : min(last, first + SHOWN - len(head)) - segment.start
            ]
            head += part.tolist()
            if len(head) == SHOWN:
                break
        steps = tuple((id(segment), last) for segment, _, last in spans)
        return cls(n_parent, tuple(spans), steps, tuple(head), snapshot.tail(SHOWN))

    def n_bytes(self) -> tuple[int, int]:
        """Bytes that the rows take in RAM, and on the device."""
        ram = device = 0.0
        for segment, first, last in self.spans:
            share = (last - first) / segment.tokens.size
            ram += share * (segment.rows.nbytes + segment.draft_rows.nbytes)
            if segment.held is not None:
                device += share * segment.held.n_bytes
        return round(ram), round(device)

    def shared(self, before: SnapshotDelta) -> int:
        """How many tokens have the same rows as ``before``, which has the same parent."""
        n = self.n_parent
        for (one, last), (other, stop) in zip(self.steps, before.steps, strict=False):
            if one != other:
                break
            n = min(last, stop)
            if last != stop:
                break
        return n


KnownParts: TypeAlias = WeakKeyDictionary[Snapshot, SnapshotDelta]
"""Results of earlier views, for as long as the snapshot exists; keeps no bytes alive."""


def view_of(
    cache: RamCache, totals: CacheStats, known: KnownParts, disk: Store | None = None
) -> CacheView:
    """The current contents: shallow parents first, and of one parent those that share most side by
    side.

    Called by the thread that owns the cache.
    """
    now = time.monotonic()
    held = []
    for snapshot in cache.snapshots():
        above = cache.tree[snapshot].parent
        n_parent, parent = (above.n, above.key.prefix.name) if above is not None else (0, "")
        own = known.get(snapshot)
        if own is None or own.n_parent != n_parent:
            own = known[snapshot] = SnapshotDelta.of(snapshot, n_parent)
        held.append((n_parent, parent, own.steps, own, snapshot))
    held.sort(key=itemgetter(0, 1, 2))
    views = []
    parent_before = ""
    before = None
    for _, parent, _, own, snapshot in held:
        shared = (
            own.shared(before) if before is not None and parent == parent_before else own.n_parent
        )
        parent_before = parent
        before = own
        row_bytes, device_bytes = own.n_bytes()
        tiers: list[Tier] = []
        tiers += ["device"] * bool(device_bytes)
        tiers += ["ram"] * bool(row_bytes or snapshot.state.parts)
        tiers += ["disk"] * (disk is not None and disk.contains(snapshot.prefix))
        views.append(
            SnapshotView(
                id=snapshot.prefix.name,
                parent=parent,
                n=snapshot.n,
                row_bytes=row_bytes,
                state_bytes=snapshot.state.n_bytes,
                hits=snapshot.hits,
                age=now - snapshot.made,
                idle=now - snapshot.used,
                pinned=snapshot in cache.pinned,
                tail=own.tail,
                head=own.head,
                device_bytes=device_bytes,
                tiers=tuple(tiers),
                shared=shared,
            )
        )
    budget = -1 if cache.budget is None else cache.budget
    copied = CacheStats(**asdict(totals))
    return CacheView(
        cache.n_slots,
        cache.n_bytes,
        budget,
        cache.n_evicted,
        copied,
        tuple(views),
        disk.view() if disk else None,
        cache.n_refused,
        n_ends=len(cache.ends),
    )
