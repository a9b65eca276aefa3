"""The stored snapshots as checks use them: their list, bytes and removal."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

from pyctl.cache.condemned import Condemned
from pyctl.cache.reads import Reading
from pyctl.cache.snapshot import Prefix
from pyctl.disk.file_format import StateName
from pyctl.disk.quarantine import Quarantine
from pyctl.disk.reader import StoreReader
from pyctl.disk.remote_store import RemoteStore
from pyctl.disk.stored_source import StoredSource
from pyctl.disk.write_queue import WriteQueue

__all__ = ["DiskChecks"]

log = logging.getLogger(__name__)


class DiskChecks:
    """The `StoredChecks` of the snapshots that ``reader`` reads and ``queue`` writes; ``remote``
    has copies of them. The engine's thread calls everything.

    Attributes:
        quarantine: The folders of quarantined files.
    """

    def __init__(
        self, reader: StoreReader, queue: WriteQueue, remote: RemoteStore | None = None
    ) -> None:
        self.quarantine = Quarantine(reader.folder)
        self._reader = reader
        self._queue = queue
        self._remote = remote
        # Quarantines that the engine's thread has asked for, and that the writing thread has done.
        self._n_condemned = 0
        self._n_quarantined = 0

    @property
    def is_in_doubt(self) -> bool:
        """True until all quarantines are complete: any stored snapshot may be one of them."""
        return self._n_quarantined < self._n_condemned

    def prefixes(self) -> list[Prefix]:
        """Return the prefixes of all stored snapshots of the model."""
        if self.is_in_doubt:
            return []
        return [state.prefix for state in self._reader.folder.states]

    def source(self, prefix: Prefix) -> Reading[StoredSource | None]:
        """Open ``prefix`` to read its files again, without the copies that RAM has; return None if
        it is gone. Raises CorruptFileError, StateError or OSError.
        """
        return (yield from self._reader.source(prefix))

    def condemn(self, condemned: Condemned) -> None:
        """Find nothing that is ``condemned`` from now on. The writing thread moves the files;
        until then, and if that fails, nothing is found at all.
        """
        self._n_condemned += 1
        for job in self._queue.jobs:
            if condemned.includes(job.snapshot):
                self._queue.remove(job.snapshot.prefix.name)
        self._exclude(StateName.from_prefix(prefix) for prefix in condemned.prefixes)
        self._queue.run_soon(partial(self._move, condemned))

    def _move(self, condemned: Condemned) -> None:
        """Move the files, on the writing thread."""
        try:
            removed = self.quarantine.keep(condemned)
        except OSError as error:
            log.error("cannot quarantine files, so none are read until a restart: %s", error)
            return
        self._exclude(record.name for record in removed if isinstance(record.name, StateName))
        self._n_quarantined += 1
        log.warning(
            "quarantine: %d files left the disk cache, some are kept in %s",
            len(removed),
            self.quarantine.path,
        )

    def _exclude(self, states: Iterable[StateName]) -> None:
        """Fetch none of ``states`` from the object store again."""
        if self._remote is None:
            return
        for state in states:
            self._remote.exclude(state)
