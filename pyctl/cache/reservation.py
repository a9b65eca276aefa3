"""Numbered places for snapshots, each promised to a prefix until its snapshot is confirmed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from pyctl.cache.snapshot import Prefix, Snapshot

__all__ = ["Reservation", "Slot", "Slots"]


@dataclass(eq=False)
class Slot:
    """A numbered place for one snapshot."""

    index: int
    snapshot: Snapshot | None = None
    reserved: bool = False


class Slots:
    """All slots: ``n_slots`` of them, or with 0 as many as there are snapshots. A prefix is in at most one."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self._slots = [Slot(index) for index in range(n_slots)]
        self._empty = dict.fromkeys(self._slots)  # what is empty for longest comes first
        self._by_prefix: dict[Prefix, Slot] = {}

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    @property
    def n_empty(self) -> float:
        """How many hold nothing; no end of them without a number."""
        return (self.n_slots or math.inf) - len(self._by_prefix)

    def occupied(self) -> list[tuple[Slot, Snapshot]]:
        """Those that hold a snapshot, with it."""
        return [(slot, slot.snapshot) for slot in self._slots if slot.snapshot is not None]

    def of(self, prefix: Prefix) -> Slot | None:
        """The one that holds the snapshot of ``prefix``."""
        return self._by_prefix.get(prefix)

    def empty(self) -> Slot | None:
        """One that holds nothing and that nobody reserved, empty for longest; None if there is none."""
        slot = next((slot for slot in self._empty if not slot.reserved), None)
        if slot is None and not self.n_slots:
            slot = Slot(len(self._slots))
            self._slots.append(slot)
            self._empty[slot] = None
        return slot

    def fill(self, slot: Slot, snapshot: Snapshot) -> None:
        """Put ``snapshot``, whose prefix no other slot holds, into an empty one."""
        del self._empty[slot]
        slot.snapshot = snapshot
        self._by_prefix[snapshot.prefix] = slot

    def clear(self, slot: Slot) -> Snapshot:
        """Take out what ``slot`` holds."""
        snapshot = slot.snapshot
        assert snapshot is not None
        del self._by_prefix[snapshot.prefix]
        slot.snapshot = None
        self._empty[slot] = None
        return snapshot


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
        """Publish ``snapshot``; False when the budget has no room for it or what the slot holds was locked meanwhile.

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
