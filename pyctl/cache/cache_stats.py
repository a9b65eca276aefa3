"""Statistics of the cache for one request and since the start, and views of its contents for
clients.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import msgspec

from pyctl.cache.evicted import WantedTokens
from pyctl.cache.plan import MIN_SHARED
from pyctl.cache.ports import DiskView, Store
from pyctl.cache.prompt_comparison import PromptComparison
from pyctl.cache.ram import RamCache
from pyctl.cache.request_kind import RequestKind
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
    "build_cache_view",
]

CONTEXT = 12
"""Tokens shown on each side of a difference."""


class Divergence(msgspec.Struct, frozen=True):
    """The position where a prompt leaves the nearest recent one, and the position that was
    restored.

    Attributes:
        position: The first token that differs.
        nearest: The position that was resumed at instead, 0 for none.
        recent: The tokens of the recent prompt around the difference, at most CONTEXT on each side.
        given: The tokens of this prompt there.
    """

    position: int
    nearest: int
    recent: tuple[int, ...] = ()
    given: tuple[int, ...] = ()

    @property
    def is_by_chance(self) -> bool:
        """True if the loss is no longer than the part that unrelated prompts share, such as the
        opening of a request for a title.
        """
        return self.position - self.nearest < MIN_SHARED

    @classmethod
    def around(cls, position: int, nearest: int, recent: Tokens, given: Tokens) -> Divergence:
        """Return a divergence with the tokens around ``position``; ``recent`` and ``given`` have
        shape (n,).
        """
        around = slice(max(position - CONTEXT, 0), position + CONTEXT)
        return cls(position, nearest, tuple(recent[around].tolist()), tuple(given[around].tolist()))


@dataclass
class RequestStats:
    """The account of one request.

    Attributes:
        n_prompt: The tokens of the prompt; once the prefill has ended, ``n_cached + n_evaluated``.
        source: The tier that the prefix came from.
        n_cached: The tokens that were not evaluated.
        n_evaluated: The tokens that were evaluated.
        n_saved: The number of snapshots that were taken.
        lookup_ms: The milliseconds of finding candidates.
        restore_ms: The milliseconds of restoring, with parking the previous conversation.
        save_ms: The milliseconds of saving, with the wait for the batch that the device was still
            computing.
        miss: The divergence from the nearest recent prompt, None if nothing was lost.
        n_prewarmed: The tokens among ``n_cached`` that were evaluated for this request before it
            came.
        n_from_device: The rows that a sequence took over from cells of the device.
        kind: The kind of the request; None if it is not to be cached.
        comparison: The comparison with the nearest recent prompt, None without one.
        restored: The id of the snapshot that was resumed from, empty without one.
        saved: The ids of the snapshots that were taken.
        n_covered: The tokens of the deepest of them.
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
    n_from_device: int = 0
    kind: RequestKind | None = None
    comparison: PromptComparison | None = None
    restored: str = ""
    saved: list[str] = field(default_factory=list)
    n_covered: int = 0

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

    @property
    def n_written(self) -> int:
        """The evaluated tokens that the cache has now: a later prompt can resume after them."""
        return max(min(self.n_covered, self.n_prompt) - self.n_cached, 0)

    def count_saved(self, name: str, n: int) -> None:
        """Count a snapshot of ``n`` tokens that was taken, under the id ``name``."""
        self.n_saved += 1
        self.saved.append(name)
        self.n_covered = max(self.n_covered, n)


@dataclass
class CacheStats:
    """Sums over all requests since the start; counts of tokens unless an attribute shows another
    unit.

    Background requests count only in ``n_prewarms`` and ``n_prewarmed``.

    Attributes:
        requests: The number of finished requests.
        n_prompt: The tokens of all prompts.
        n_evaluated: The tokens of prompts that were evaluated.
        n_predicted: The tokens that were generated.
        n_cached: The tokens that were restored, by tier.
        hits: The number of requests that resumed, by tier.
        n_saved: The number of snapshots that were taken.
        failed_restores: The number of restores that failed.
        n_prewarmed: The tokens that background requests evaluated.
        n_prewarms: The number of prompts of background requests.
        n_prewarmed_used: The tokens among ``n_prewarmed`` that requests resumed from.
        saved_seconds: The estimated seconds of evaluation that restores saved.
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

"""Tokens shown of the end of each prefix, and of the beginning of its tokens after the one before.
"""

Tier: TypeAlias = Literal["device", "ram", "disk"]

"""The places of a snapshot's data."""


class SnapshotView(msgspec.Struct, frozen=True):
    """A snapshot as clients see it.

    Attributes:
        id: The name of its prefix.
        parent: The id of the snapshot of its deepest shorter prefix, empty if there is none.
        n: The number of tokens.
        row_bytes: The bytes in RAM of the rows that it adds to its parent.
        state_bytes: The bytes of its state.
        hits: How many times it was used.
        age: The seconds since it was made.
        idle: The seconds since its last hit.
        pinned: Whether it is pinned.
        tail: The last tokens of its prefix.
        head: The first tokens after its parent.
        device_bytes: The bytes on the device of the rows that it adds to its parent.
        tiers: The tiers that have its added rows or its state.
        shared: The tokens whose rows it shares with the view before it, if both have the same
            parent; else the parent's tokens. `build_cache_view` places those that share most next
            to each other, so the numbers show where branches part, even where there is no snapshot.
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


class LiveView(msgspec.Struct, frozen=True):
    """A live sequence as clients see it.

    Attributes:
        id: The sequence id.
        n: The number of tokens.
        busy: Whether a request runs on it.
        at: The id of the deepest snapshot of its tokens, empty for none.
        tail: The last tokens.
        task: The id of the request that runs on it, -1 for none.
    """

    id: int
    n: int
    busy: bool
    at: str
    tail: tuple[int, ...]
    task: int = -1


@dataclass(frozen=True)
class CacheView:
    """The contents of the cache at one moment.

    Attributes:
        n_slots: The maximum number of snapshots, 0 for no limit.
        n_bytes: The bytes of all snapshots in RAM.
        budget: The maximum of these bytes, -1 for no limit.
        n_evicted: The snapshots that were evicted since the start.
        totals: Sums over all requests.
        snapshots: The snapshots in RAM.
        disk: Sums of the disk, None without one.
        n_refused: The snapshots that were too large for the budget.
        live: The live sequences.
        revision: A number that grows as soon as anything of the view is different.
        n_ends: The number of prompt ends, which are not among ``snapshots``.
        wanted: The tokens of prompts that RAM had evicted before.
        n_evicted_early: The evicted snapshots at which a client had announced to resume.
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
    wanted: WantedTokens = field(default_factory=WantedTokens)
    n_evicted_early: int = 0


_Steps: TypeAlias = tuple[tuple[int, int], ...]
"""Segments, by their ids, each with the position up to which a snapshot has it."""


class SnapshotDelta(msgspec.Struct, frozen=True):
    """The part of a snapshot after the tokens of its parent.

    Attributes:
        n_parent: The number of the parent's tokens.
        spans: The segments of the part, ascending, each with its first and last position.
        steps: The ids of these segments with their last positions, to compare and sort by.
        head: The first tokens of the part, at most SHOWN.
        tail: The last tokens of the snapshot, at most SHOWN.
    """

    n_parent: int
    spans: tuple[tuple[Segment, int, int], ...]
    steps: _Steps
    head: tuple[int, ...]
    tail: tuple[int, ...]

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, n_parent: int) -> SnapshotDelta:
        """Return the delta of ``snapshot``, at the cost of its new part."""
        spans = []
        for segment, last in snapshot.iter_chain():
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
        """Return the bytes of the rows in RAM, and on the device."""
        ram = device = 0.0
        for segment, first, last in self.spans:
            share = (last - first) / segment.tokens.size
            ram += share * (segment.rows.nbytes + segment.draft_rows.nbytes)
            if segment.held is not None:
                device += share * segment.held.n_bytes
        return round(ram), round(device)

    def shared(self, before: SnapshotDelta) -> int:
        """Return how many tokens have the same rows in ``before``, which has the same parent."""
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


class _Placed(NamedTuple):
    """A snapshot with its difference to its parent, whose id is empty if there is none."""

    parent: str
    delta: SnapshotDelta
    snapshot: Snapshot


def build_cache_view(
    cache: RamCache, totals: CacheStats, known: KnownParts, disk: Store | None = None
) -> CacheView:
    """Return the current contents: shallow parents first, and of one parent the snapshots that
    share most side by side.

    The thread that owns the cache calls this. ``known`` has the deltas of earlier views: only
    snapshots that are new, or got another parent, are read again.
    """
    now = time.monotonic()
    views = []
    before: _Placed | None = None
    for placed in _placed_snapshots(cache, known):
        shared = placed.delta.n_parent
        if before is not None and before.parent == placed.parent:
            shared = placed.delta.shared(before.delta)
        is_on_disk = disk is not None and disk.contains(placed.snapshot.prefix)
        views.append(
            _snapshot_view(
                placed,
                shared,
                is_on_disk=is_on_disk,
                is_pinned=placed.snapshot in cache.index.pinned,
                now=now,
            )
        )
        before = placed
    limit = -1 if cache.budget.limit is None else cache.budget.limit
    copied = CacheStats(**asdict(totals))
    return CacheView(
        cache.budget.n_slots,
        cache.n_bytes,
        limit,
        cache.evictor.n_evicted,
        copied,
        tuple(views),
        disk.view() if disk else None,
        cache.n_refused,
        n_ends=len(cache.prompt_ends),
        wanted=replace(cache.evictor.evicted.wanted),
        n_evicted_early=cache.evictor.n_evicted_early,
    )


def _placed_snapshots(cache: RamCache, known: KnownParts) -> list[_Placed]:
    """Return the snapshots in the order of `build_cache_view`, and add new deltas to ``known``."""
    placed = []
    for snapshot in cache.snapshots():
        above = cache.index.tree[snapshot].parent
        n_parent = above.n if above is not None else 0
        delta = known.get(snapshot)
        if delta is None or delta.n_parent != n_parent:
            delta = SnapshotDelta.from_snapshot(snapshot, n_parent)
            known[snapshot] = delta
        parent = above.key.prefix.name if above is not None else ""
        placed.append(_Placed(parent, delta, snapshot))
    placed.sort(key=lambda item: (item.delta.n_parent, item.parent, item.delta.steps))
    return placed


def _snapshot_view(
    placed: _Placed, shared: int, *, is_on_disk: bool, is_pinned: bool, now: float
) -> SnapshotView:
    """Return a snapshot as clients see it, at the time ``now``."""
    snapshot = placed.snapshot
    delta = placed.delta
    row_bytes, device_bytes = delta.n_bytes()
    tiers: list[Tier] = []
    if device_bytes:
        tiers.append("device")
    if row_bytes or snapshot.state.parts:
        tiers.append("ram")
    if is_on_disk:
        tiers.append("disk")
    return SnapshotView(
        id=snapshot.prefix.name,
        parent=placed.parent,
        n=snapshot.n,
        row_bytes=row_bytes,
        state_bytes=snapshot.state.n_bytes,
        hits=snapshot.hits,
        age=now - snapshot.made,
        idle=now - snapshot.used,
        pinned=is_pinned,
        tail=delta.tail,
        head=delta.head,
        device_bytes=device_bytes,
        tiers=tuple(tiers),
        shared=shared,
    )
