"""The segments that snapshots in RAM share: references to each, and bytes, counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator

from pyctl.cache.snapshot import NOTHING, Block, Segment, Snapshot

__all__ = ["SegmentPool"]


class SegmentPool:
    """The segments that the snapshots in RAM share, with the number of references to each.

    A segment is alive from its first snapshot to its last.

    Attributes:
        n_bytes: The bytes of all snapshots in RAM, each shared segment and block counted once.
        n_shed: Copies in RAM that were dropped since the device holds the rows, since the start.
        on_drop: The function that gets each segment just before its rows are dropped. It may not
            change the cache.
    """

    def __init__(self) -> None:
        self.n_bytes = self.n_shed = 0
        self._windows: Counter[int] = Counter()  # states that hold a block, by its id
        self.on_drop: Callable[[Segment], None] = lambda segment: None
        self._alive: dict[Segment, None] = {}

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._alive)

    def __contains__(self, segment: Segment) -> bool:
        return segment in self._alive

    def is_whole(self, snapshot: Snapshot) -> bool:
        """Return whether no segment that ``snapshot`` needs was dropped.

        The ancestors of an alive segment are alive too, so the search ends at the first one.
        """
        segment: Segment | None = snapshot.segment
        while segment is not None and segment not in self._alive:
            if segment.dropped:
                return False
            segment = segment.parent
        return True

    def n_new(self, segment: Segment | None, blocks: Collection[Block] = ()) -> int:
        """Return the bytes that a snapshot adds: of ``segment`` and its ancestors as far as they
        are not alive yet, and of new ``blocks`` of a window.
        """
        n_bytes = sum(int(block.nbytes) for block in blocks if id(block) not in self._windows)
        while segment is not None and segment not in self._alive:
            n_bytes = n_bytes + segment.n_bytes
            segment = segment.parent
        return n_bytes

    def add_reference(self, snapshot: Snapshot) -> None:
        """Count ``snapshot`` as a user of its segments and of the blocks of its window."""
        self.n_bytes += snapshot.state.own_bytes
        for block in snapshot.state.shared:
            self._windows[id(block)] += 1
            self.n_bytes += int(block.nbytes) if self._windows[id(block)] == 1 else 0
        segment: Segment | None = snapshot.segment
        while segment is not None:
            segment.references += 1
            if segment.references > 1:
                return
            self._alive[segment] = None
            self.n_bytes += segment.n_bytes
            segment = segment.parent

    def release(self, snapshot: Snapshot) -> None:
        """Count ``snapshot`` no longer, and drop the segments that only it needed, the deepest
        first.
        """
        self.n_bytes -= snapshot.state.own_bytes
        for block in snapshot.state.shared:
            self._windows[id(block)] -= 1
            if not self._windows[id(block)]:
                del self._windows[id(block)]
                self.n_bytes -= int(block.nbytes)
        segment: Segment | None = snapshot.segment
        while segment is not None:
            segment.references -= 1
            if segment.references > 0:
                return
            del self._alive[segment]
            self.n_bytes -= segment.n_bytes
            self.on_drop(segment)
            segment.drop()  # a live sequence may still point here, and its bytes stop counting now
            segment = segment.parent

    def add_rows(self, segment: Segment, rows: Block) -> None:
        """Enter ``rows`` as the copy in RAM of an alive ``segment``.

        Raises ValueError if the segment has rows in RAM already, or is not alive.
        """
        if segment not in self._alive or segment.rows.size:
            raise ValueError(
                "only a segment that is alive, and has no rows in RAM, can be given some"
            )
        segment.rows = rows
        self.n_bytes += int(rows.nbytes)

    def drop_ram_copy(self, segment: Segment) -> None:
        """Drop the copy in RAM of rows that the device holds. Raises ValueError if the device does
        not hold them, or the segment is not alive.
        """
        if segment not in self._alive or segment.held is None:
            raise ValueError(
                "only a segment that is alive, and on the device, can do without its rows in RAM"
            )
        self.n_bytes -= int(segment.rows.nbytes)
        segment.rows = NOTHING
        self.n_shed += 1

    def copies(self) -> list[Segment]:
        """Return the segments that are in RAM and on the device."""
        return [
            segment for segment in self._alive if segment.held is not None and segment.rows.size
        ]

    def n_freed(self, snapshot: Snapshot, *, without_copies: bool = False) -> int:
        """Return the bytes that become free when ``snapshot`` is evicted: of its state, and of the
        segments that only it needs.

        With ``without_copies`` the result is the one after all `copies` were dropped. A block of a
        window that several states share counts in equal parts, since it goes with the last of them.
        """
        n_bytes = snapshot.state.own_bytes
        segment = snapshot.segment
        n_bytes += sum(
            int(block.nbytes) // max(self._windows[id(block)], 1) for block in snapshot.state.shared
        )
        while segment.references == 1:
            is_copy = without_copies and segment.held is not None
            n_bytes += segment.n_bytes - (int(segment.rows.nbytes) if is_copy else 0)
            if segment.parent is None:
                break
            segment = segment.parent
        return n_bytes

    @staticmethod
    def n_needed(
        fixed: Collection[Snapshot],
        staying: Collection[Snapshot] = (),
        segment: Segment | None = None,
        blocks: Collection[Block] = (),
    ) -> int:
        """Return the bytes of all given snapshots, of ``segment`` with its ancestors, and of
        ``blocks`` of a window.

        Rows of ``fixed`` snapshots count as if all of them were in RAM. Of all others, rows that
        the device holds do not count.
        """
        counted: dict[Segment, int] = {}
        for snapshot in fixed:
            for link in snapshot.chain:
                counted[link] = link.n_bytes + link.device_only_bytes
        for deepest in (segment, *(snapshot.segment for snapshot in staying)):
            above = deepest
            while above is not None and above not in counted:
                counted[above] = above.n_bytes - (
                    int(above.rows.nbytes) if above.held is not None else 0
                )
                above = above.parent
        states = [snapshot.state for snapshot in {*fixed, *staying}]
        shared = (block for state in states for block in state.shared)
        windows = {id(block): int(block.nbytes) for block in (*shared, *blocks)}
        return (
            sum(counted.values()) + sum(state.own_bytes for state in states) + sum(windows.values())
        )
