"""A snapshot on its way from disk: its tokens are verified, its bytes come in the order in which they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

from pyctl.cache.segment import Segment, Snapshot
from pyctl.errors import StateError

__all__ = ["Arrival"]


class Arrival:
    """``snapshot`` may be looked at by one reader and is whole only after `complete`.

    ``coming`` are the reads under way per segment, ``state`` those of the state. ``done`` is told once when all have
    succeeded, ``failed`` the first error; the readers then get StateError.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        coming: Mapping[Segment, Iterable[Future[None]]],
        state: Iterable[Future[None]],
        *,
        done: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.snapshot = snapshot
        self._coming = {id(segment): list(reads) for segment, reads in coming.items()}
        self._state = list(state)
        self._done, self._failed = done, failed

    def wait_rows(self, segment: Segment) -> None:
        """Return when the rows of ``segment`` are here, verified."""
        self._wait(self._coming.get(id(segment), []))

    def wait_state(self) -> None:
        """Return when the state is here, verified."""
        self._wait(self._state)

    def complete(self) -> Snapshot:
        """The snapshot when all of it is here."""
        for reads in [*self._coming.values(), self._state]:
            self._wait(reads)
        self._done()
        return self.snapshot

    def cancel(self) -> None:
        """Read nothing that has not begun."""
        for read in [read for reads in [*self._coming.values(), self._state] for read in reads]:
            read.cancel()

    def _wait(self, reads: list[Future[None]]) -> None:
        for read in reads:
            error = read.exception()
            if error is not None:
                self.cancel()
                self._failed(error)
                raise StateError(f"the prefix cache on disk: {error}") from error
        reads.clear()
