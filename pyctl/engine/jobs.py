"""Jobs of other threads: functions that the engine's thread runs between two steps, and reads of
its objects while it waits.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

__all__ = ["Job", "StateReads"]

R = TypeVar("R")


class Job(Generic[R]):
    """A function to call between two steps, once no request owns sequence ``seq`` (-1: none), and
    its future.

    With ``needs_model``, an unloaded model is loaded first.
    """

    def __init__(
        self, function: Callable[[], R], *, needs_model: bool = False, seq: int = -1
    ) -> None:
        self.future: Future[R] = Future()
        self.needs_model = needs_model
        self.seq = seq
        self._function = function

    def run(self) -> None:
        """Call the function, unless the future was cancelled."""
        if self.future.set_running_or_notify_cancel():
            try:
                result = self._function()
            except BaseException as error:
                with contextlib.suppress(
                    Exception
                ):  # `fail` may have set an error from another thread
                    self.future.set_exception(error)
            else:
                with contextlib.suppress(Exception):
                    self.future.set_result(result)

    def fail(self, error: Exception | None) -> None:
        """Fail the future with ``error``, or cancel it: the function never runs or never
        returns.
        """
        with contextlib.suppress(Exception):
            if error is None:
                self.future.cancel()
            elif self.future.running() or self.future.set_running_or_notify_cancel():
                self.future.set_exception(error)


class ReadWindow:
    """The block of `StateReads.allowed`. One object serves all blocks: each token enters two."""

    def __init__(self, reads: StateReads, *, evaluating: bool) -> None:
        self._reads = reads
        self._evaluating = evaluating

    def __enter__(self) -> None:
        reads = self._reads
        reads.is_evaluating = self._evaluating
        reads._closed.release()
        if reads._jobs:
            reads.run()

    def __exit__(self, *error: object) -> None:
        self._reads._closed.acquire()
        self._reads.is_evaluating = False


class StateReads:
    """Runs reads of data that the engine's thread owns, on any thread, while that thread has them
    `allowed`.

    Others wait until then. While ``is_evaluating`` they must not call the backend's memory.
    """

    def __init__(self) -> None:
        self.is_evaluating = False
        self._closed = (
            threading.Lock()
        )  # held by the engine's thread except within `allowed`, and by each read
        self._closed.acquire()
        self._jobs: deque[Job[Any]] = deque()
        self._while_evaluating = ReadWindow(self, evaluating=True)
        self._while_waiting = ReadWindow(self, evaluating=False)

    def allowed(self, *, evaluating: bool = True) -> ReadWindow:
        """Let others read during the ``with`` block, in which the engine's thread changes nothing
        that they read.

        ``evaluating``: it waits for the backend, else for work or the disk.
        """
        return self._while_evaluating if evaluating else self._while_waiting

    def add(self, job: Job[Any]) -> None:
        """Queue a read, for `run`."""
        self._jobs.append(job)

    def run(self) -> None:
        """Run the queued reads, unless the engine's thread is at work or another thread does so."""
        # Each holder of the lock looks again after its release: no read that was queued meanwhile
        # is forgotten.
        while self._jobs and self._closed.acquire(blocking=False):
            try:
                with contextlib.suppress(IndexError):
                    while True:
                        self._jobs.popleft().run()
            finally:
                self._closed.release()

    def fail(self, error: Exception | None) -> None:
        """Fail the queued reads with ``error``, or cancel them."""
        with contextlib.suppress(IndexError):
            while True:
                self._jobs.popleft().fail(error)
