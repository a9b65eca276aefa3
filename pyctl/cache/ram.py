"""Snapshots in RAM: the index, the reservation of a slot until its snapshot is confirmed, and the count of bytes."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from pyctl.cache.eviction import EvictionPolicy, PrefixTree, SecondChance
from pyctl.cache.snapshot import Prefix, PromptMatch, Segment, Snapshot

__all__ = ["RamCache", "Reservation", "Slot"]

log = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
"""How often the log says at most that something is too large."""


@dataclass(eq=False)
class Slot:
    """A numbered place for one snapshot."""

    index: int
    snapshot: Snapshot | None = None
    pinned: bool = False
    reserved: bool = False


@dataclass(eq=False)
class Reservation:
    """A slot promised to ``prefix``. Leaving the ``with`` block without `confirm` gives it back unchanged.

    with cache.prepare(prefix, n_bytes) as reservation:
        ...                                   # an exception here leaves the cache as it was
        reservation.confirm(snapshot)
    """

    prefix: Prefix
    slot: Slot
    publish: Callable[[Reservation, Snapshot], bool]
    status: Literal["open", "confirmed", "aborted"] = "open"

    def confirm(self, snapshot: Snapshot) -> bool:
        """Publish ``snapshot``; False when the budget has no room for it or what the slot holds was pinned meanwhile.

        Raises ValueError when the snapshot is not of the reserved prefix or the reservation has ended.
        """
        if self.status != "open":
            raise ValueError(f"the reservation of {self.prefix} is {self.status}")
        if snapshot.prefix != self.prefix:
            raise ValueError(f"the slot is reserved for {self.prefix}, not for {snapshot.prefix}")
        self.slot.reserved = False
        self.status = "confirmed"
        return self.publish(self, snapshot)

    def abort(self) -> None:
        """Give the slot back; what it holds stays. Does nothing after `confirm`."""
        if self.status == "open":
            self.slot.reserved = False
            self.status = "aborted"

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class RamCache:
    """Up to ``n_slots`` snapshots within ``budget`` bytes (None: no limit).

    A published prefix always equals what its snapshot holds, a slot holds one snapshot, and a prefix is in at most one
    slot. What is pinned, reserved, or protected by the caller (the restore source) is never evicted; what else goes is
    the policy's choice. What would not fit beside these, with all rows that it builds on, is refused before anything
    goes. Not thread-safe: the engine's thread owns it.
    """

    def __init__(self, n_slots: int, budget: int | None) -> None:
        self.slots = [Slot(index) for index in range(n_slots)]
        self.budget = budget
        self.n_bytes = 0
        self.n_evicted = 0
        self.n_refused = 0
        self.tree: PrefixTree[int] = PrefixTree()
        self._policy: EvictionPolicy[int] = SecondChance(self.tree, n_slots)
        self.held: list[Snapshot] = []
        self._next_slot = 0
        self._quiet_until = 0.0
        self._by_prefix: dict[Prefix, Slot] = {}

    @property
    def enabled(self) -> bool:
        """Whether anything is kept at all."""
        return bool(self.slots) and self.budget != 0

    def occupied(self) -> list[tuple[Slot, Snapshot]]:
        """The slots that hold a snapshot, with it."""
        return [(slot, slot.snapshot) for slot in self.slots if slot.snapshot is not None]

    def snapshots(self) -> list[Snapshot]:
        """All published snapshots, by slot."""
        return [snapshot for _, snapshot in self.occupied()]

    # -- lookup ------------------------------------------------------------------------------------------------------

    def lookup(self, prompt: PromptMatch, limit: int) -> list[Snapshot]:
        """Snapshots that hold a prefix of ``prompt`` of at most ``limit`` tokens, deepest first."""
        limit = min(limit, int(prompt.tokens.size))
        found = []
        for n in sorted({prefix.n for prefix in self._by_prefix if prefix.n <= limit}):
            slot = self._by_prefix.get(prompt.prefix(n))
            if slot is not None and slot.snapshot is not None and prompt.shared(slot.snapshot) == n:
                found.append(slot.snapshot)
        return found[::-1]

    def overlap(self, prompt: PromptMatch) -> tuple[Snapshot | None, int]:
        """The snapshot that shares the most leading tokens with ``prompt``, and how many."""
        best: tuple[Snapshot | None, int] = (None, 0)
        for snapshot in self.snapshots():
            shared = prompt.shared(snapshot)
            if shared > best[1]:
                best = snapshot, shared
        return best

    def get(self, prefix: Prefix) -> Snapshot | None:
        """The snapshot of exactly ``prefix``."""
        slot = self._by_prefix.get(prefix)
        return slot.snapshot if slot is not None else None

    def conversation_ends(self) -> list[Snapshot]:
        """The snapshots that no deeper one builds on, the last used first."""
        ends = [snapshot for slot, snapshot in self.occupied() if not self.tree[slot.index].children]
        return sorted(ends, key=lambda snapshot: snapshot.used, reverse=True)

    def touch(self, snapshot: Snapshot) -> None:
        """Count a hit; only the snapshot that was used, not its ancestors."""
        snapshot.hits += 1
        snapshot.used = time.monotonic()
        slot = self._by_prefix.get(snapshot.prefix)
        if slot is not None:
            self.tree[slot.index].used = snapshot.used
            self._policy.touched(slot.index)

    def __contains__(self, prefix: Prefix) -> bool:
        return prefix in self._by_prefix

    # -- change ------------------------------------------------------------------------------------------------------

    def prepare(
        self, prefix: Prefix, n_bytes: int, protected: Collection[Snapshot] = (), parent: Segment | None = None
    ) -> Reservation | None:
        """Reserve a slot for a snapshot of ``prefix`` that will add ``n_bytes`` to the rows of ``parent``.

        Nothing leaves before `confirm`. None when the prefix is here already, the budget could not hold it beside what
        has to stay, or every slot is protected, pinned or reserved.
        """
        if not self.enabled or prefix in self._by_prefix or not self._fits(prefix, n_bytes, parent, protected):
            return None
        slot = self._free() or self._victim(protected)
        if slot is None:
            return None
        slot.reserved = True
        return Reservation(prefix, slot, lambda reservation, snapshot: self._publish(reservation, snapshot, protected))

    def drop(self, snapshot: Snapshot) -> None:
        """Remove a snapshot, such as one that failed to restore."""
        slot = self._by_prefix.get(snapshot.prefix)
        if slot is not None and slot.snapshot is snapshot:
            self._empty(slot)

    def hold(self, snapshot: Snapshot) -> None:
        """Keep the bytes of ``snapshot``, which no lookup finds, until `release`.

        They count, and others leave for them; when nothing is left that may go, they go beyond the budget.
        """
        self._retain(snapshot.segment)
        self.n_bytes += snapshot.state.n_bytes
        self.held.append(snapshot)
        self._shrink(())

    def release(self, snapshot: Snapshot) -> None:
        """Give up what `hold` kept."""
        self.held.remove(snapshot)
        self.n_bytes -= snapshot.state.n_bytes
        self._release(snapshot.segment)

    def clear(self) -> int:
        """Drop everything that is not pinned or reserved; returns how many snapshots went."""
        going = [slot for slot, _ in self.occupied() if not slot.pinned and not slot.reserved]
        for slot in going:
            self._empty(slot)
        return len(going)

    def pin(self, name: str, pinned: bool) -> bool:
        """Protect the snapshot of the prefix called ``name`` from eviction, or stop to; False if there is none."""
        for prefix, slot in self._by_prefix.items():
            if prefix.name == name:
                slot.pinned = pinned
                return True
        return False

    def _free(self) -> Slot | None:
        """The next empty slot after the one filled last that nobody reserved."""
        at = self._next_slot
        in_turn = itertools.chain(self.slots[at:], self.slots[:at])
        return next((slot for slot in in_turn if slot.snapshot is None and not slot.reserved), None)

    def _victim(self, protected: Collection[Snapshot]) -> Slot | None:
        slots, kept = self.slots, set(protected)

        def may_go(index: int) -> bool:
            slot = slots[index]
            return not (slot.pinned or slot.reserved or slot.snapshot in kept)

        index = self._policy.victim(may_go)
        return slots[index] if index is not None else None

    def _publish(self, reservation: Reservation, snapshot: Snapshot, protected: Collection[Snapshot]) -> bool:
        if any(segment.dropped for segment in snapshot.chain):
            raise ValueError("the snapshot builds on rows that were given up")
        slot = reservation.slot
        if slot.pinned or not self._fits(snapshot.prefix, snapshot.state.n_bytes, snapshot.segment, protected):
            return False
        self._retain(snapshot.segment)
        self.n_bytes += snapshot.state.n_bytes
        if slot.snapshot is not None:
            self._evict(slot)
        twin = self._by_prefix.get(snapshot.prefix)
        if twin is not None:
            self._empty(twin)
        slot.snapshot = snapshot
        self._by_prefix[snapshot.prefix] = slot
        self._next_slot = (slot.index + 1) % len(self.slots)
        self.tree.add(slot.index, snapshot.n, snapshot.chain, snapshot.used)
        self._policy.added(slot.index)
        self._shrink({snapshot, *protected})
        return True

    def _fits(self, prefix: Prefix, n_bytes: int, segment: Segment | None, protected: Collection[Snapshot]) -> bool:
        """Whether ``n_bytes`` fit into the budget with ``segment``, those before it, and all that has to stay."""
        if self.budget is None:
            return True
        staying = [each for slot, each in self.occupied() if slot.pinned or slot.reserved or each in protected]
        staying += self.held
        n_bytes += sum(snapshot.state.n_bytes for snapshot in staying)
        counted: set[Segment] = set()
        for link in (segment, *(snapshot.segment for snapshot in staying)):
            while link is not None and link not in counted:
                counted.add(link)
                n_bytes += link.n_bytes
                link = link.parent
        if n_bytes <= self.budget:
            return True
        self.n_refused += 1
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + QUIET_SECONDS
            log.warning(
                "no snapshot at %d tokens: with what it builds on and what has to stay it needs %.1f MiB of RAM, and "
                "snapshots may take %.1f MiB; shorter prefixes of it stay",
                *(prefix.n, n_bytes / 2**20, self.budget / 2**20),
            )
        return False

    def _shrink(self, protected: Collection[Snapshot]) -> None:
        while self.budget is not None and self.n_bytes > self.budget:
            victim = self._victim(protected)
            if victim is None:
                return
            self._evict(victim)

    def _evict(self, slot: Slot) -> None:
        self._empty(slot)
        self.n_evicted += 1

    def _empty(self, slot: Slot) -> None:
        snapshot = slot.snapshot
        assert snapshot is not None
        del self._by_prefix[snapshot.prefix]
        self.tree.remove(slot.index)
        slot.snapshot, slot.pinned = None, False
        self.n_bytes -= snapshot.state.n_bytes
        self._release(snapshot.segment)

    # -- bytes -------------------------------------------------------------------------------------------------------

    def _retain(self, segment: Segment | None) -> None:
        while segment is not None:
            segment.references += 1
            if segment.references > 1:
                return
            self.n_bytes += segment.n_bytes
            segment = segment.parent

    def _release(self, segment: Segment | None) -> None:
        while segment is not None:
            segment.references -= 1
            if segment.references > 0:
                return
            self.n_bytes -= segment.n_bytes
            segment.drop()  # a live sequence may still point here, and its bytes stop counting now
            segment = segment.parent
