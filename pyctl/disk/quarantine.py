"""Files that a check found wrong: taken out of every lookup, and some of them kept for a report."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pyctl.cache.condemned import Condemned
from pyctl.disk.file_format import QUARANTINE, Name, SegmentName, StateName, parse
from pyctl.disk.index import Record, file_path
from pyctl.disk.model_folder import ModelFolder
from pyctl.files.atomic_file import files_in, make_private, write_atomic
from pyctl.settings.limit import limit

__all__ = ["MAX_CASES", "Quarantine"]

log = logging.getLogger(__name__)

MAX_CASES = limit(4, "quarantined snapshots of a model", "the oldest are removed", "disk")

MAX_BYTES = limit(
    2**30,
    "files kept of quarantined snapshots of a model, or 1/64 of --kv-cache-budget",
    "the oldest are removed",
    "disk",
    "bytes",
)

REPORT = "report.json"


class Quarantine:
    """The quarantine of the model of ``folder``: a folder per case, with a report and the files
    that are in doubt, as many as fit.

    Everything that needs a condemned file leaves the index and the model's folder in one
    transaction. A kill in the middle leaves index rows without files, which recovery removes.
    Errors are OSError; one thread calls everything.
    """

    def __init__(self, folder: ModelFolder) -> None:
        self.path = folder.path / QUARANTINE
        self._folder = folder
        self._max_bytes = folder.auxiliary_limit(MAX_BYTES)

    def keep(self, condemned: Condemned) -> list[Record]:
        """Remove all files that depend on ``condemned`` from the directory, and keep its own;
        return the records of those that are gone from the index.
        """
        names = _names_of(condemned)
        case = self._new_case()
        with self._folder.directory.changing() as transaction:
            removed: list[Record] = []
            for name in names:
                removed += transaction.graph.remove(self._folder.key(name))
            self._move(_own_files(removed, names), case)
            transaction.delete(removed)
        report = {**condemned.report, "files_removed": len(removed)}
        write_atomic(case / REPORT, json.dumps(report, indent=1).encode())
        self._shrink()
        return removed

    def cases(self) -> list[Path]:
        """Return the folders of the cases, the oldest first."""
        return sorted(path for path in files_in(self.path) if path.is_dir())

    def _new_case(self) -> Path:
        """Create the folder of the next case, whose name sorts after all earlier ones."""
        case = self.path / f"{time.time_ns():020}"
        make_private(case)
        return case

    def _move(self, records: Iterable[Record], case: Path) -> None:
        """Move the files of ``records`` to ``case`` until the next would be too much."""
        n_bytes = 0
        for record in records:
            n_bytes += record.n_bytes
            if n_bytes > self._max_bytes:
                return
            with suppress(FileNotFoundError):
                source = file_path(self._folder.directory.path, record.key)
                os.replace(source, case / str(record.name))

    def _shrink(self) -> None:
        """Remove the oldest cases until those left are within the limits. The newest one stays."""
        cases = self.cases()
        while len(cases) > MAX_CASES or (len(cases) > 1 and _n_bytes(cases) > self._max_bytes):
            _remove(cases.pop(0))


def _names_of(condemned: Condemned) -> list[Name]:
    """Return the names of the files in doubt: states first, then segments from the deepest on."""
    names: list[Name] = [StateName.from_prefix(prefix) for prefix in condemned.prefixes]
    damaged = parse(condemned.file)
    if damaged is not None:
        names.append(damaged)
    for segment in condemned.segments:
        if isinstance(segment.file.name, SegmentName):
            names.append(segment.file.name)
    return names


def _own_files(removed: Iterable[Record], names: Iterable[Name]) -> list[Record]:
    """Return the records among ``removed`` whose files have ``names``, in the order of these."""
    by_name = {record.name: record for record in removed}
    return [by_name[name] for name in names if name in by_name]


def _n_bytes(cases: Iterable[Path]) -> int:
    return sum(path.lstat().st_size for case in cases for path in files_in(case))


def _remove(case: Path) -> None:
    """Remove a case: its files, then its folder."""
    for path in files_in(case):
        path.unlink(missing_ok=True)
    case.rmdir()
