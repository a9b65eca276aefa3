"""Numbered places for snapshots, each promised to a prefix until its snapshot is confirmed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from pyctl.cache.snapshot import Prefix, Snapshot

__all__ = ["Reservation", "Slot"]


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
