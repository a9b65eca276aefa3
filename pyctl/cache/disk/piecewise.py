"""Snapshots that have no room in RAM, written one segment after the other."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from pyctl.cache.disk.readers import STALL_SECONDS
from pyctl.cache.disk.write_behind import MAX_WAITING, WriteBehind
from pyctl.cache.disk.writer import OpenWrite, StoreWriter
from pyctl.cache.snapshot import Block, Prefix, Segment, Snapshot
from pyctl.errors import StateError

__all__ = ["AGAIN_SECONDS", "PieceOf", "Piecewise"]

log = logging.getLogger(__name__)

R = TypeVar("R")

PieceOf: TypeAlias = "Callable[[Segment], Block | None]"
"""Copies the rows of a segment to RAM; None if there is no room for them now."""

AGAIN_SECONDS = 0.02
"""How soon to look again whether a segment is written."""


class Piecewise:
    """Writes what is offered with ``files``, one snapshot at a time, the newest first.

    The engine's thread calls all but `drop`, and hands over one segment with each `step`: of the rows that only the
    device has no more are in RAM for this, and it may do something else before the next. Files are written on the
    thread of ``behind``, and can be found when all are there. ``label`` says to people what a snapshot holds.
    """

    def __init__(self, files: StoreWriter, behind: WriteBehind, label: Callable[[Snapshot], str]) -> None:
        self._files, self._behind, self._label = files, behind, label
        self._lock = threading.Lock()  # of the next two
        self._waiting: OrderedDict[Prefix, weakref.ref[Snapshot]] = OrderedDict()
        self._snapshot: Snapshot | None = None
        self._steps: Generator[Future[Any] | None, None, None] | None = None
        self._job: Future[Any] | None = None
        self._moved = 0.0
        self.n_given_up = 0

    def offer(self, snapshot: Snapshot) -> None:
        """Write ``snapshot`` once `step` comes to it; who gives up its rows before that need not ask."""
        with self._lock:
            if self._snapshot is not None and self._snapshot.prefix == snapshot.prefix:
                return
            self._waiting[snapshot.prefix] = weakref.ref(snapshot)
            self._waiting.move_to_end(snapshot.prefix)
            while len(self._waiting) > MAX_WAITING:
                self._waiting.popitem(last=False)
                self.n_given_up += 1
        self._moved = time.monotonic()

    def drop(self, name: str) -> bool:
        """Do not publish the snapshot of the prefix called ``name``; False if it is not on its way. Any thread."""
        with self._lock:
            found = [prefix for prefix in self._waiting if prefix.name == name]
            for prefix in found:
                del self._waiting[prefix]
            now = self._snapshot if self._snapshot is not None and self._snapshot.prefix.name == name else None
            if now is not None:
                now.for_disk = False  # a copy of its own
            return bool(found) or now is not None

    @property
    def n_waiting(self) -> int:
        """Snapshots that are not written yet. Any thread."""
        with self._lock:
            return len(self._waiting) + (self._snapshot is not None)

    @property
    def is_moving(self) -> bool:
        """Whether something is being written, and the disk takes it."""
        return self.n_waiting > 0 and time.monotonic() - self._moved < STALL_SECONDS

    def step(self, piece_of: PieceOf) -> float | None:
        """Go on with the next segment; after how many seconds to call again, None if nothing is left."""
        if self._job is not None:
            if not self._job.done():
                return AGAIN_SECONDS if self.is_moving else STALL_SECONDS
            self._job, self._moved = None, time.monotonic()
        if self._steps is None:
            if (snapshot := self._take()) is None:
                return None
            self._steps = self._write(snapshot, piece_of)
        try:
            self._job = next(self._steps)
            return AGAIN_SECONDS
        except StopIteration:
            self._forget()
        except (OSError, LookupError, CancelledError, StateError, MemoryError) as error:
            self._give_up(str(error))
        except Exception as error:
            log.exception("the prefix cache on disk")
            self._give_up(str(error))
        return 0.0

    def run(self, piece_of: PieceOf, deadline: float) -> bool:
        """Write what is left, until ``deadline`` (monotonic seconds); False if that was not time enough for all."""
        while (left := deadline - time.monotonic()) > 0 and (seconds := self.step(piece_of)) is not None:
            if self._job is not None:
                wait([self._job], left)
            else:
                time.sleep(min(seconds, left))
        done = self._snapshot is None and self._take() is None
        while self._snapshot is not None or self._take() is not None:
            self._give_up("there is no time")
        return done

    def _take(self) -> Snapshot | None:
        """The next one, as a copy, but not of its bytes."""
        with self._lock:
            while self._snapshot is None and self._waiting:
                _, known = self._waiting.popitem(last=True)
                if (snapshot := known()) is not None:
                    self._snapshot = replace(snapshot)
            return self._snapshot

    def _write(self, snapshot: Snapshot, piece_of: PieceOf) -> Generator[Future[Any] | None, None, None]:
        """Yields what it waits for, or None to look again soon."""
        behind, files = self._behind, self._files
        writing = yield from _result(lambda: behind.step(lambda: files.open(snapshot, self._label(snapshot))))
        if writing is None:
            return
        try:
            for segment in writing.missing:
                yield from _result(partial(self._add, snapshot, writing, segment, piece_of))
            if not (yield from _result(lambda: behind.step(partial(self._finish, writing)))):
                raise LookupError("the directory has no room for it, or does not want it any more")
        finally:
            behind.run_soon(partial(files.end, writing))  # removing much takes a while

    def _add(self, snapshot: Snapshot, writing: OpenWrite, segment: Segment, piece_of: PieceOf) -> Future[None] | None:
        """Have ``segment`` written; None if there is no room for its rows now."""
        if not snapshot.for_disk or any(each.dropped for each in writing.missing):
            raise LookupError("others needed the cells of its rows, or it was dropped")
        if (rows := piece_of(segment)) is not None:
            return self._behind.step(partial(self._files.add, writing, segment, rows))
        if not self.is_moving:
            raise LookupError("RAM has no room for a part of it")
        return None

    def _finish(self, writing: OpenWrite) -> int:
        n_bytes = self._files.finish(writing)
        self._behind.n_bytes += n_bytes
        return n_bytes

    def _give_up(self, why: str) -> None:
        if self._snapshot is not None:
            log.warning("the prefix of %d tokens is not written: %s", self._snapshot.n, why)
        self.n_given_up += 1
        self._forget()

    def _forget(self) -> None:
        if self._job is not None:
            self._job.cancel()  # unless it has begun
        if self._steps is not None:
            self._steps.close()
        self._steps = self._job = None
        with self._lock:
            self._snapshot = None


def _result(begin: Callable[[], Future[R] | None]) -> Generator[Future[Any] | None, None, R]:
    """What the future gives that ``begin`` makes, as soon as it makes one."""
    while (future := begin()) is None:
        yield None
    try:
        yield future
        return future.result()
    finally:
        del future  # its error knows this frame: both, and rows with them, would stay until the collector comes
