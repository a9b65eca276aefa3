"""The supply of the disk with snapshots, and with copies of rows that only the device has.

The disk's thread reads blocks in RAM and never touches the device; the engine's thread makes the
blocks. Two orders keep a block from being read before it is complete:

1. A snapshot enters the queue only after `synchronize`: its rows and its state may still be on
   their way from the device when the cache has it already.
2. A write stops at rows that only the device has, and other writes continue. The disk's thread
   calls `Store.on_rows_needed`, by which the engine's thread calls `flush_copies` between two
   steps. It synchronizes before it hands rows over, so that evicted snapshots, whose copies have
   started before, become complete too.

Rows are handed over one segment at a time, as the disk needs them: a copy takes RAM on top of the
cache, and the disk's thread drops it when the segment is written.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyctl.cache.device_copies import DeviceCopies
from pyctl.cache.ports import SequenceMemory, Store
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Snapshot

__all__ = ["WriteBack"]


class WriteBack:
    """The supply of ``disk`` with snapshots of ``cache``; does nothing without a disk.

    The engine's thread calls everything between two steps: a copy takes a few milliseconds.
    Snapshots that wait take RAM on top of the cache; beyond a limit the snapshots of the lowest
    value are dropped.
    """

    def __init__(
        self, memory: SequenceMemory, cache: RamCache, copies: DeviceCopies, disk: Store | None
    ) -> None:
        self._memory = memory
        self._cache = cache
        self._copies = copies
        self._disk = disk

    def write(self, snapshots: Sequence[Snapshot], *, has_last: bool = False) -> None:
        """Queue ``snapshots`` and start to copy their rows that only the device has. With
        ``has_last`` the last one is written however short it is.
        """
        if self._disk is not None and snapshots:
            self._memory.synchronize()  # the bytes of new snapshots may still be on their way
            for snapshot in snapshots:
                self._disk.write(snapshot, is_last=has_last and snapshot is snapshots[-1])
        self.flush_copies()

    def write_interim(self, snapshot: Snapshot) -> bool:
        """Queue a ``snapshot`` of a prompt that is still being evaluated; return False if the disk
        has it or may not have it.
        """
        if self._disk is None:
            return False
        self._memory.synchronize()
        return self._disk.write_interim(snapshot)

    def flush_copies(self) -> None:
        """Complete the blocks that wait for the disk, and copy the segment that the disk's thread
        needs.
        """
        if self._disk is not None and self._disk.awaits_rows:
            self._memory.synchronize()
            self._disk.supply_rows(self._copies.fetch_rows_now)
            self.trim_backlog()

    def wants(self, snapshot: Snapshot) -> bool:
        """Return whether the disk may be given ``snapshot``."""
        return self._disk is not None and snapshot.facts.for_disk

    def copy_next(self) -> bool:
        """Copy some rows that only the device has to RAM, in an idle moment; return whether any
        were copied.

        If there are none left, write the conversations that are too large to be copied when the
        program ends.
        """
        if self._copies.copy_one():
            return True
        if self._disk is not None and self._disk.policy.kind != "off":
            ends = self._cache.conversation_ends()[::-1]
            self.write([end for end in ends if self._copies.exceeds_backlog(end)])
        return False

    def trim_backlog(self) -> None:
        """Drop evicted snapshots, the least worth first, while a slow disk leaves too many
        unwritten.
        """
        while self._disk is not None and self._copies.is_backlog_full():
            if not self._disk.drop_lowest_value():
                return
