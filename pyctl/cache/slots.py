"""Numbered places for snapshots, handed out round-robin with a second chance, and the reservations that fill them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from pyctl.cache.prefix import Prefix
from pyctl.cache.segment import Snapshot

__all__ = ["Reservation", "Slot", "Slots"]


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
    places: list[Slot] = field(init=False)

    def __post_init__(self) -> None:
        self.places = [Slot(index) for index in range(self.capacity)]

    def occupied(self) -> list[Slot]:
        return [slot for slot in self.places if slot.snapshot is not None]

    def from_hand(self) -> list[Slot]:
        """All slots, in the order in which the hand will pass them."""
        return self.places[self.hand :] + self.places[: self.hand]

    def free(self) -> Slot | None:
        """The next empty slot after the hand that nobody reserved."""
        return next((slot for slot in self.from_hand() if slot.snapshot is None and not slot.reserved), None)

    def sweep(self, spared: Collection[Snapshot]) -> Slot | None:
        """Advance the hand to a slot whose snapshot may go, or None when all are spared, pinned or reserved.

        A slot touched since the hand last passed is passed over once.
        """
        for _ in range(2 * self.capacity):
            slot = self.places[self.hand]
            self.hand = (self.hand + 1) % self.capacity
            if slot.snapshot is None or slot.reserved or slot.pinned or slot.snapshot in spared:
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
