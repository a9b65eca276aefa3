"""Snapshots in RAM: the index, the reservation of a slot until its snapshot is confirmed, and the count of bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from pyctl.cache.snapshot import NOTHING, Prefix, PromptMatch, Segment, Snapshot

__all__ = ["RamCache", "Reservation", "Slot", "Slots"]


@dataclass(eq=False)
class Slot:
    """One place. ``touched`` is set by a hit and taken away when the hand passes."""

    index: int
    snapshot: Snapshot | None = None
    touched: bool = False
    pinned: bool = False
    reserved: bool = False

    @property
    def last_use(self) -> float:
        """When its snapshot was made or last hit, in monotonic seconds; 0 for an empty slot."""
        return self.snapshot.used if self.snapshot is not None else 0.0


@dataclass(eq=False)
class Slots:
    """``capacity`` slots and the hand that walks over them."""

    capacity: int
    hand: int = 0
    slots: list[Slot] = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [Slot(index) for index in range(self.capacity)]

    def occupied(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.snapshot is not None]

    def from_hand(self) -> list[Slot]:
        """All slots, in the order in which the hand will pass them."""
        return self.slots[self.hand :] + self.slots[: self.hand]

    def free(self) -> Slot | None:
        """The next empty slot after the hand that nobody reserved."""
        return next((slot for slot in self.from_hand() if slot.snapshot is None and not slot.reserved), None)

    def sweep(self, protected: Collection[Snapshot]) -> Slot | None:
        """Advance the hand to a slot whose snapshot may go, or None when all are protected, pinned or reserved.

        A slot touched since the hand last passed is passed over once.
        """
        for _ in range(2 * self.capacity):
            slot = self.slots[self.hand]
            self.hand = (self.hand + 1) % self.capacity
            if slot.snapshot is None or slot.reserved or slot.pinned or slot.snapshot in protected:
                continue
            if slot.touched:
                slot.touched = False
                continue
            return slot
        return None


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
        """Publish ``snapshot``; False when the budget leaves no room for it.

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
    slot. Snapshots that the caller protects (the restore source), pinned ones and reserved slots are never victims.
    Not thread-safe: the engine's thread owns it.
    """

    def __init__(self, n_slots: int, budget: int | None) -> None:
        self.slots = Slots(n_slots)
        self.budget = budget
        self.n_bytes = 0
        self.n_evicted = 0
        self._by_prefix: dict[Prefix, Slot] = {}

    @property
    def enabled(self) -> bool:
        return self.slots.capacity > 0 and self.budget != 0

    def snapshots(self) -> list[Snapshot]:
        """All published snapshots, by slot."""
        return [slot.snapshot for slot in self.slots.slots if slot.snapshot is not None]

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
        """The ends of all conversations: snapshots that no deeper one builds on, the last used first."""
        snapshots = self.snapshots()
        inner = {
            shallow.prefix
            for shallow in snapshots
            for deep in snapshots
            if shallow.n < deep.n and deep.chain.get(shallow.segment, 0) >= shallow.n
        }
        ends = [snapshot for snapshot in snapshots if snapshot.prefix not in inner]
        return sorted(ends, key=lambda snapshot: snapshot.used, reverse=True)

    def touch(self, snapshot: Snapshot) -> None:
        """Count a hit; only the snapshot that was used, not its ancestors."""
        snapshot.hits += 1
        snapshot.used = time.monotonic()
        slot = self._by_prefix.get(snapshot.prefix)
        if slot is not None:
            slot.touched = True

    def __contains__(self, prefix: Prefix) -> bool:
        return prefix in self._by_prefix

    # -- change ------------------------------------------------------------------------------------------------------

    def prepare(self, prefix: Prefix, n_bytes: int, protected: Collection[Snapshot] = ()) -> Reservation | None:
        """Reserve a slot for a snapshot of ``prefix`` that will add ``n_bytes``.

        Nothing leaves before `confirm`. None when the prefix is here already, the budget could never hold it, or every
        slot is protected, pinned or reserved.
        """
        if not self.enabled or prefix in self._by_prefix or (self.budget is not None and n_bytes > self.budget):
            return None
        slot = self.slots.free() or self._superseded(protected) or self.slots.sweep(protected)
        if slot is None:
            return None
        slot.reserved = True
        return Reservation(prefix, slot, lambda reservation, snapshot: self._publish(reservation, snapshot, protected))

    def drop(self, snapshot: Snapshot) -> None:
        """Remove a snapshot, such as one that failed to restore."""
        slot = self._by_prefix.get(snapshot.prefix)
        if slot is not None and slot.snapshot is snapshot:
            self._vacate(slot)

    def clear(self) -> int:
        """Remove everything that is not pinned or reserved; returns how many snapshots went."""
        going = [slot for slot in self.slots.occupied() if not slot.pinned and not slot.reserved]
        for slot in going:
            self._vacate(slot)
        return len(going)

    def pin(self, name: str, pinned: bool) -> bool:
        """Protect the snapshot of the prefix called ``name`` from eviction, or stop to; False if there is none."""
        for prefix, slot in self._by_prefix.items():
            if prefix.name == name:
                slot.pinned = pinned
                return True
        return False

    def _publish(self, reservation: Reservation, snapshot: Snapshot, protected: Collection[Snapshot]) -> bool:
        if any(segment.dropped for segment in snapshot.chain):
            raise ValueError("the snapshot builds on rows that were given up")
        slot = reservation.slot
        self._retain(snapshot.segment)
        self.n_bytes += int(snapshot.state.nbytes)
        if slot.snapshot is not None:
            self._vacate(slot)
            self.n_evicted += 1
        twin = self._by_prefix.get(snapshot.prefix)
        if twin is not None:
            self._vacate(twin)
        slot.snapshot, slot.touched = snapshot, False
        self._by_prefix[snapshot.prefix] = slot
        self.slots.hand = (slot.index + 1) % self.slots.capacity
        return self._shrink({snapshot, *protected}) or self._take_back(slot)

    def _shrink(self, protected: Collection[Snapshot]) -> bool:
        while self.budget is not None and self.n_bytes > self.budget:
            victim = self._superseded(protected) or self.slots.sweep(protected)
            if victim is None:
                return False
            self._vacate(victim)
            self.n_evicted += 1
        return True

    def _take_back(self, slot: Slot) -> bool:
        self._vacate(slot)
        return False

    def _superseded(self, protected: Collection[Snapshot]) -> Slot | None:
        """The slot of the interior snapshot that would be missed least, among the half that was not used for longest.

        Interior means: on its chain lies a shallower snapshot, and it lies on the chain of a deeper one. The head and
        the newest of a conversation are therefore never meant. What is fresh stays: the branch points of the
        conversation that goes on are worth more than the ends of those that do not. Least missed is the one with the
        fewest tokens between itself and the next shallower one, which is where its prompts would resume.
        """
        by_use = sorted((slot for slot in self.slots.occupied() if slot.snapshot), key=lambda slot: slot.last_use)
        snapshots = self.snapshots()

        def stems_from(deep: Snapshot, shallow: Snapshot) -> bool:
            return shallow.n < deep.n and deep.chain.get(shallow.segment, 0) >= shallow.n

        least: tuple[int, Slot] | None = None
        for slot in by_use[: (len(by_use) + 1) // 2]:
            snapshot = slot.snapshot
            if snapshot is None or slot.pinned or slot.reserved or snapshot in protected:
                continue
            below = max((other.n for other in snapshots if stems_from(snapshot, other)), default=0)
            if below and any(stems_from(other, snapshot) for other in snapshots):
                gap = snapshot.n - below
                if least is None or gap < least[0]:
                    least = gap, slot
        return least[1] if least is not None else None

    def _vacate(self, slot: Slot) -> None:
        snapshot = slot.snapshot
        assert snapshot is not None
        del self._by_prefix[snapshot.prefix]
        slot.snapshot, slot.touched, slot.pinned = None, False, False
        self.n_bytes -= int(snapshot.state.nbytes)
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
            # A live sequence may still point here; the memory must go now, when its bytes stop counting.
            segment.rows, segment.dropped = NOTHING, True
            segment = segment.parent
