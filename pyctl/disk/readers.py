"""Threads that read from a disk that may hang: such a read is abandoned, together with its
thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any, TypeAlias, TypeVar

from pyctl.cache.reads import Reads
from pyctl.errors import StateError
from pyctl.settings.limit import limit

__all__ = ["DiskReads", "Job", "Readers", "StalledReadError"]

R = TypeVar("R")

Job: TypeAlias = Callable[[], None]
"""A read into place, for any thread."""

STALL_SECONDS = limit(
    10.0, "a read from a disk that hangs", "a miss; no reads until it returns", "disk", "s"
)

RESTORE_SECONDS = limit(120.0, "waiting for a snapshot from disk", "a miss", "disk", "s")


class StalledReadError(StateError):
    """A read did not return in time."""


class Readers:
    """``n_threads`` threads, started when there is work; neither a request nor the end of the
    program waits for one. A read that takes ``stall_seconds`` of ``clock`` is abandoned.
    """

    def __init__(
        self,
        n_threads: int,
        name: str,
        stall_seconds: float = STALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the queue; ``clock`` gives monotonic seconds, ``name`` is of the threads."""
        self.stall_seconds = stall_seconds
        self.clock = clock
        self._n_threads = n_threads
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._n_open = 0  # reads that wait or are under way
        self.moved = clock()
        """When a read last returned or started."""

    def start(self, jobs: Iterable[Callable[[], R]]) -> list[Future[R]]:
        """Run ``jobs`` soon."""
        futures = []
        for job in jobs:
            future: Future[R] = Future()
            futures.append(future)
            with self._lock:
                self._n_open += 1
            self._jobs.put((future, job))
        with self._lock:
            while len(self._threads) < min(self._n_threads, self._n_open):
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return futures

    def run(self, jobs: Iterable[Job]) -> None:
        """Run ``jobs`` and wait for all of them; then raise the error of the first that failed."""
        errors = [error for read in self.start(jobs) if (error := read.exception()) is not None]
        if errors:
            raise errors[0]

    def wait(self, reads: Sequence[Future[Any]], seconds: float) -> None:
        """Wait until all of ``reads`` have ended or one has failed, at most ``seconds``."""
        wait(reads, seconds, FIRST_EXCEPTION)

    @property
    def is_busy(self) -> bool:
        """True if a read runs, or waits for its thread."""
        return self._n_open > 0

    def close(self, timeout: float = 1.0) -> None:
        """End the threads when they have done the queue, and wait up to ``timeout`` seconds for
        that.
        """
        deadline = time.monotonic() + timeout
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _run(self) -> None:
        """Run the jobs of the queue until it yields None.

        The result is set last, when this thread has counted the job as done and dropped all
        references to it: the waiting thread may free the memory that the job filled as soon as it
        has the result.
        """
        while (item := self._jobs.get()) is not None:
            future, job = item
            begins = future.set_running_or_notify_cancel()
            if begins:
                self.moved = self.clock()
                try:
                    tell = partial(future.set_result, job())
                except BaseException as error:
                    tell = partial(future.set_exception, error)
            # The waiting thread may free the filled memory once it has the result: drop all
            # references before.
            del item, job, future
            with self._lock:
                self._n_open -= 1
                self.moved = self.clock() if begins else self.moved
            if begins:
                tell()
                del tell


class DiskReads(Reads):
    """Some reads of ``readers`` with a waiting caller, until ``deadline`` of their clock at
    most.
    """

    def __init__(self, futures: Sequence[Future[Any]], readers: Readers, deadline: float) -> None:
        self.futures = futures
        self._readers = readers
        self._deadline = deadline
        self._began = readers.clock()

    def cancel(self) -> None:
        """Cancel the reads that have not started."""
        for future in self.futures:
            future.cancel()

    def ready(self) -> bool:
        """Return whether a wait would be of no use: all reads have ended, one has failed, or the
        disk hangs.
        """
        return (
            all(future.done() for future in self.futures)
            or self._failed() is not None
            or self._is_late()
        )

    def wait(self, seconds: float) -> None:
        """Wait until they are ready, ``seconds`` at most."""
        self._readers.wait(self.futures, seconds)

    def check(self) -> None:
        """Raise the error of the first failed read. Raises StalledReadError if some reads have not
        ended.
        """
        if (error := self._failed()) is not None:
            raise error
        if any(future.cancelled() or not future.done() for future in self.futures):
            raise StalledReadError("the disk does not return from a read")

    def _failed(self) -> BaseException | None:
        done = (future for future in self.futures if future.done() and not future.cancelled())
        return next((error for future in done if (error := future.exception())), None)

    def _is_late(self) -> bool:
        now = self._readers.clock()
        still_seconds = now - max(self._began, self._readers.moved)
        return now > self._deadline or still_seconds > self._readers.stall_seconds
