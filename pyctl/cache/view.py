"""The cache as a client sees it: a tree of prefixes with what each costs and how it is used."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from pyctl.cache.ram import RamCache
from pyctl.cache.report import Totals
from pyctl.cache.segment import Snapshot
from pyctl.cache.tier import DiskTier, DiskView

__all__ = ["CacheView", "SnapshotView", "view_of"]

SHOWN = 24
"""Tokens shown of the end of each prefix."""


@dataclass(frozen=True)
class SnapshotView:
    """One snapshot. ``id`` names its prefix; ``parent`` is the id of the deepest shorter prefix of it, or empty.

    ``n`` is in tokens, ``row_bytes`` what it adds to its parent, ``age`` and ``idle`` seconds since it was made and
    since its last hit. ``tail`` are the last tokens of the prefix.
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


@dataclass(frozen=True)
class CacheView:
    """Everything at one moment. ``budget`` is in bytes, -1 for no limit."""

    n_slots: int
    n_bytes: int
    budget: int
    n_evicted: int
    totals: Totals
    snapshots: tuple[SnapshotView, ...]
    disk: DiskView | None = None


def view_of(cache: RamCache, totals: Totals, disk: DiskTier | None = None) -> CacheView:
    """What is held now, in RAM shallow prefixes first. Called by the thread that owns the cache."""
    now = time.monotonic()
    views = []
    by_depth = sorted(cache.slots.occupied(), key=lambda slot: slot.snapshot.n if slot.snapshot else 0)
    known: list[Snapshot] = []
    for slot in by_depth:
        snapshot = slot.snapshot
        if snapshot is None:
            continue
        parent = next((p for p in reversed(known) if snapshot.reach.get(p.segment, 0) >= p.n), None)
        n_new = snapshot.n - (parent.n if parent else 0)
        widths = [segment.rows.nbytes / segment.tokens.size for segment in snapshot.reach]
        views.append(
            SnapshotView(
                id=snapshot.prefix.name,
                parent=parent.prefix.name if parent else "",
                n=snapshot.n,
                row_bytes=round(n_new * widths[0]),
                state_bytes=int(snapshot.state.nbytes),
                hits=snapshot.hits,
                age=now - snapshot.made,
                idle=now - snapshot.used,
                pinned=slot.pinned,
                tail=snapshot.tail(SHOWN),
            )
        )
        known.append(snapshot)
    budget = -1 if cache.budget is None else cache.budget
    copied = Totals(**asdict(totals))
    return CacheView(
        cache.slots.capacity,
        cache.n_bytes,
        budget,
        cache.n_evicted,
        copied,
        tuple(views),
        disk.view() if disk else None,
    )
