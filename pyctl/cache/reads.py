"""Reads that run on other threads, and waits for them that block no other work.

A generator yields `Reads` while they run; its caller does other work until they are `ready`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TypeAlias, TypeVar

__all__ = ["Reading", "Reads", "finish", "finished"]

R = TypeVar("R")


class Reads(ABC):
    """Reads of a store that are under way. A class, since each step checks whether it got one."""

    @abstractmethod
    def ready(self) -> bool:
        """Return whether a wait would be of no use: all reads have ended, one has failed, or the
        store hangs.
        """

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait until the reads are ready, at most ``seconds``."""

    @abstractmethod
    def check(self) -> None:
        """Raise the error of the first failed read. Raises StateError or TimeoutError if some reads
        have not ended.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the reads that have not started."""


Reading: TypeAlias = Generator[Reads, None, R]
"""Yields the reads that it waits for and returns its result."""


def finished(reads: Reads) -> Reading[None]:
    """Wait until ``reads`` have ended. Raises the errors of `Reads.check`."""
    while not reads.ready():
        yield reads
    reads.check()


def finish(reading: Reading[R]) -> R:
    """Return the result of ``reading``, waiting for it on this thread."""
    while True:
        try:
            reads = next(reading)
        except StopIteration as stop:
            result: R = stop.value
            return result
        reads.wait(0.1)
