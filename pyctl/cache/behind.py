"""Writing behind: snapshots go to the disk on a thread of their own and never delay a token."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

from pyctl.cache.prefix import Prefix
from pyctl.cache.segment import Segment, Snapshot

__all__ = ["WriteBehind", "Writer"]

log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
"""After the disk refused, it is left alone so long."""


class Writer(Protocol):
    """Where snapshots go."""

    def write(self, snapshot: Snapshot) -> int:
        """Store ``snapshot``; the bytes written, 0 if it was there. Raises OSError when the disk refuses."""


class WriteBehind:
    """A queue of at most ``limit`` snapshots, newest last; a full one gives up its oldest.

    A disk that is full or read-only is a warning once a minute; the server goes on from RAM.
    """

    def __init__(self, writer: Writer, limit: int = 8) -> None:
        self._writer = writer
        self._limit = limit
        self._waiting: OrderedDict[Prefix, Snapshot] = OrderedDict()
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closing = False
        self._resume_at = 0.0
        self.n_bytes = 0
        self.n_failed = 0
        self._thread = threading.Thread(target=self._run, name="pyctl-disk", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot) -> None:
        """Queue ``snapshot``. Its rows are held until they are written, also if the cache in RAM drops them."""
        copy = held(snapshot)
        with self._changed:
            if self._closing or snapshot.prefix in self._waiting:
                return
            self._waiting[snapshot.prefix] = copy
            while len(self._waiting) > self._limit:
                self._waiting.popitem(last=False)
            self._changed.notify_all()

    @property
    def n_waiting(self) -> int:
        """Snapshots in the queue."""
        return len(self._waiting)

    def later(self, function: Callable[[], None]) -> None:
        """Have ``function``, which may wait for the disk, called by the thread that writes."""
        with self._changed:
            self._calls.append(function)
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until everything queued is written, ``timeout`` seconds at most; False if something is left."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._calls and not self._busy, timeout)

    def close(self, timeout: float) -> bool:
        """Flush, then stop the thread; what is left after ``timeout`` seconds is given up."""
        done = self.flush(timeout)
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._calls.clear()
            self._changed.notify_all()
        self._thread.join(timeout=1.0)
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting or self._calls)
                if self._closing:
                    return
                job = self._calls.popleft() if self._calls else self._next_write()
                self._busy = True
            try:
                job()
            except Exception:
                log.exception("the prefix cache on disk")
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _next_write(self) -> Callable[[], None]:
        # The newest first: it is what a restart would miss most.
        _, snapshot = self._waiting.popitem(last=True)
        return lambda: self._write(snapshot)

    def _write(self, snapshot: Snapshot) -> None:
        if time.monotonic() < self._resume_at:
            return
        try:
            self.n_bytes += self._writer.write(snapshot)
        except OSError as error:
            self.n_failed += 1
            self._resume_at = time.monotonic() + RETRY_SECONDS
            log.warning("the prefix cache cannot be written, serving goes on from RAM: %s", error)
        except Exception:
            self.n_failed += 1
            log.exception("a snapshot at %d could not be written", snapshot.n)


def held(snapshot: Snapshot) -> Snapshot:
    """A copy with segments of its own that share the bytes, so that nobody can take them away."""
    parent: Segment | None = None
    for segment in reversed(snapshot.reach):
        parent = Segment(segment.start, segment.tokens, segment.rows, parent, segment.ends)
    assert parent is not None
    return Snapshot(snapshot.prefix, parent, snapshot.state, snapshot.exact)
