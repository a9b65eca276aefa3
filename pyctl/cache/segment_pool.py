"""The segments that snapshots in RAM share: references to each, and bytes, counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator

from pyctl.cache.snapshot import NOTHING, Block, Segment, Snapshot

__all__ = ["SegmentPool"]


class SegmentPool:
    """Counts references to segments, and the bytes of all snapshots in RAM (``n_bytes``).

    A segment is alive from its first snapshot to its last. ``on_drop`` is called with it just
    before its rows are dropped, and may not change the cache.
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
        """Whether no segment that ``snapshot`` needs was dropped. An alive segment needs only alive
        ones.
        """
        segment: Segment | None = snapshot.segment
        while segment is not None and segment not in self._alive:
            if segment.dropped:
                return False
            segment = segment.parent
        return True

    def n_new(self, segment: Segment | None, blocks: Collection[Block] = ()) -> int:
        """Bytes of ``segment`` and its parents that are not alive yet, and of ``blocks`` of a
        window that are new.
        """
        n_bytes = sum(int(block.nbytes) for block in blocks if id(block) not in self._windows)
        while segment is not None and segment not in self._alive:
            n_bytes = n_bytes + segment.n_bytes
            segment = segment.parent
        return n_bytes

    def retain(self, snapshot: Snapshot) -> None:
        """``snapshot`` needs its segments from now on."""
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
        """``snapshot`` is gone; so are the segments that only it needed."""
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
        """Let ``segment`` also have its rows in RAM. Raises ValueError if it has some, or is not
        alive.
        """
        if segment not in self._alive or segment.rows.size:
            raise ValueError(
                "only a segment that is alive, and has no rows in RAM, can be given some"
            )
        segment.rows = rows
        self.n_bytes += int(rows.nbytes)

    def drop_ram_copy(self, segment: Segment) -> None:
        """Give up the copy in RAM of rows that the device holds. Raises ValueError if it holds
        none.
        """
        if segment not in self._alive or segment.held is None:
            raise ValueError(
                "only a segment that is alive, and on the device, can do without its rows in RAM"
            )
        self.n_bytes -= int(segment.rows.nbytes)
        segment.rows = NOTHING
        self.n_shed += 1

    def copies(self) -> list[Segment]:
        """The segments that are in RAM and on the device."""
        return [
            segment for segment in self._alive if segment.held is not None and segment.rows.size
        ]

    def n_freed(self, snapshot: Snapshot, *, without_copies: bool = False) -> int:
        """Bytes that go with ``snapshot``: its state, and of segments that only it needs; with
        ``without_copies`` as if `copies` had been shed before. What states share of windows counts
        in equal parts: it goes with the last.
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
        """Bytes of all of these, ``segment`` with its parents, and a window's ``blocks``: the rows
        of ``fixed`` as if all were in RAM, the others' that the device holds as if none were.
        """
        counted: dict[Segment, int] = {}
        for snapshot in fixed:
            for link in snapshot.chain:
                counted[link] = link.n_bytes + link.only_held_bytes
        for at in (segment, *(snapshot.segment for snapshot in staying)):
            above = at
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
