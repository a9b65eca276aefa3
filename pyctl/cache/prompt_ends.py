"""The very ends of prompts: what an equal prompt needs so that nothing of it is evaluated."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator

from pyctl.cache.segment_pool import SegmentPool
from pyctl.cache.snapshot import Prefix, Segment, Snapshot
from pyctl.limit import limit

__all__ = ["PromptEnds"]

MOST_ENDS = limit(8, "ends of prompts that are kept for equal prompts", "the least recently used leave", "memory")


class PromptEnds:
    """Snapshots at the very ends of prompts, whose states have the outputs there, for equal prompts alone.

    Conversations go on elsewhere, so these are the first to leave, the least recently used before others. ``pool``
    counts their bytes, and none of ``locked`` leaves. ``room`` says how many bytes are free with so many more, negative
    if they are not, ``n_places`` how many prompt ends there may be, and ``shrink`` has other snapshots leave.
    """

    def __init__(
        self,
        pool: SegmentPool,
        locked: Container[Snapshot],
        room: Callable[[int], float],
        shrink: Callable[[], None],
        n_places: Callable[[], float],
    ) -> None:
        self._pool, self._locked, self._room, self._shrink = pool, locked, room, shrink
        self._n_places: Callable[[], float] = lambda: min(n_places(), MOST_ENDS)
        self._ends: OrderedDict[Prefix, Snapshot] = OrderedDict()

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._ends.values())

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def n_bytes(self) -> int:
        """Bytes of their states, which become free at least when all of them leave."""
        return sum(end.state.n_bytes for end in self)

    def get(self, prefix: Prefix) -> Snapshot | None:
        """The one of the whole prompt ``prefix``, which somebody is about to use."""
        if prefix in self._ends:
            self._ends.move_to_end(prefix)
        return self._ends.get(prefix)

    def through(self, segment: Segment) -> list[Snapshot]:
        """Those that need ``segment``."""
        return [end for end in self if segment in end.chain]

    def may_add(self, n_bytes: int, *, is_wanted: bool) -> bool:
        """Whether one that adds ``n_bytes`` can stay. Unless it ``is_wanted``, only others of its kind leave for it."""
        return self._n_places() > 0 and (is_wanted or self._room(n_bytes) + self.n_bytes >= 0)

    def add(self, snapshot: Snapshot, *, is_wanted: bool) -> bool:
        """Keep one, locked by the caller, instead of an older one of its prompt; False if there is no room for it.

        ValueError if it builds on rows that were given up.
        """
        if not self._pool.is_whole(snapshot):
            raise ValueError("the snapshot builds on rows that were given up")
        self._pool.retain(snapshot)
        if (older := self._ends.get(snapshot.prefix)) is not None:
            self.drop(older)
        self._ends[snapshot.prefix] = snapshot
        self.fit()
        if is_wanted:
            self._shrink()
        if self._room(0) < 0 or len(self) > self._n_places():
            self.drop(snapshot)
            return False
        return True

    def drop(self, snapshot: Snapshot) -> None:
        """Give one up, if it is here."""
        if self._ends.get(snapshot.prefix) is snapshot:
            del self._ends[snapshot.prefix]
            self._pool.release(snapshot)

    def fit(self, n_bytes: int = 0) -> None:
        """Have as many leave, none that is locked, as places and ``n_bytes`` more make necessary."""
        for end in list(self):
            if self._room(n_bytes) >= 0 and len(self) <= self._n_places():
                return
            if end not in self._locked:
                self.drop(end)

    def lose(self, segment: Segment) -> None:
        """Give up all that need ``segment``."""
        for end in self.through(segment):
            self.drop(end)

    def lose_from(self, snapshot: Snapshot) -> None:
        """Give up those of prompts that begin with what ``snapshot`` holds."""
        for end in list(self):
            if any(each is snapshot.segment and last >= snapshot.n for each, last in end.chain.items()):
                self.drop(end)

    def clear(self) -> None:
        """Give up all."""
        for end in list(self):
            self.drop(end)
