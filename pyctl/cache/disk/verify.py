"""Index against files in both directions: what is wrong in a cache directory, and putting it right."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

from pyctl.atomic_file import is_abandoned, temp_pid
from pyctl.cache.disk.file_format import (
    PROMPTS,
    REPLIES,
    WORDS,
    CorruptFileError,
    Header,
    SegmentName,
    StateName,
    check_fingerprint,
    parse,
)
from pyctl.cache.disk.graph import FileGraph, Key
from pyctl.cache.disk.index import Index, Record
from pyctl.cache.disk.segment_files import read_header, read_jobs, remove_file

__all__ = ["VerifyReport", "verify"]

Runner: TypeAlias = Callable[[Iterable[Callable[[], None]]], None]


@dataclass
class VerifyReport:
    """What a check found, each as ``<fingerprint>/<file>``; ``files`` and ``n_bytes`` count what is whole.

    ``missing``: in the index without a file; ``unknown``: whole files that were not in the index; ``broken``: damaged
    files; ``useless``: segments that no state needs, and what hangs on an incomplete chain; ``temps``: left over.
    ``foreign`` files are somebody else's, and stay.
    """

    files: int = 0
    n_bytes: int = 0
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    useless: list[str] = field(default_factory=list)
    temps: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not (self.missing or self.unknown or self.broken or self.useless or self.temps)


def verify(directory: Path, index: Index, run: Runner | None, fix: bool) -> VerifyReport:
    """Compare, reading headers or, with ``run`` to run jobs, every byte; OSError, sqlite3.Error.

    The files are read without holding up anyone; what changed meanwhile is looked at again before it is put right.
    """
    report = VerifyReport()
    whole: dict[Key, Record] = {}
    broken: list[Key] = []
    with index.reading() as connection:
        known = {record.key for record in Index.records(connection)}
    for path in _ours(directory, report, fix):
        try:
            whole[path.parent.name, path.name] = _record(path, read_header(path), run)
        except FileNotFoundError:
            if not path.is_symlink():
                continue
            broken.append((path.parent.name, path.name))
        except CorruptFileError:
            broken.append((path.parent.name, path.name))
    report.broken = [_label(key) for key in broken]
    if fix:
        with index.writing() as connection:
            _settle(directory, connection, whole, broken, report)
    else:
        report.missing = [_label(key) for key in sorted(known - whole.keys() - set(broken))]
        report.unknown = [_label(key) for key in sorted(whole.keys() - known)]
        report.useless = [_label(key) for key in sorted(FileGraph(whole.values()).unsound())]
    report.files, report.n_bytes = len(whole), sum(record.n_bytes for record in whole.values())
    return report


def _settle(
    directory: Path, connection: sqlite3.Connection, whole: dict[Key, Record], broken: list[Key], report: VerifyReport
) -> None:
    for key in broken:
        Index.delete(connection, *key)
        remove_file(directory.joinpath(*key))
    known = {record.key: record for record in Index.records(connection)}
    for key in known.keys() - whole.keys():
        if not directory.joinpath(*key).is_file():
            Index.delete(connection, *key)
            report.missing.append(_label(key))
    for key, record in list(whole.items()):
        if not directory.joinpath(*key).exists():
            del whole[key]
        elif key not in known or known[key].n_bytes != record.n_bytes or known[key].parent != record.parent:
            Index.insert(connection, record)
            report.unknown.append(_label(key))
    graph = FileGraph(Index.records(connection))
    for key in graph.unsound():
        Index.delete(connection, *key)
        remove_file(directory.joinpath(*key))
        whole.pop(key, None)
        report.useless.append(_label(key))


def _ours(directory: Path, report: VerifyReport, fix: bool) -> Iterator[Path]:
    """The files of the cache; temp files that belong to nobody are noted and, with ``fix``, removed."""
    for home in sorted(directory.iterdir()):
        if not home.is_dir() or not _is_fingerprint(home.name):
            continue
        for path in sorted(home.iterdir()):
            if parse(path.name) is not None:
                yield path
            elif path.name in (PROMPTS, REPLIES, WORDS):
                continue
            elif temp_pid(path.name) is None:
                report.foreign.append(_label((home.name, path.name)))
            elif is_abandoned(path):
                report.temps.append(_label((home.name, path.name)))
                if fix:
                    remove_file(path)


def _record(path: Path, header: Header, run: Runner | None) -> Record:
    if run is not None:
        outs = {part.what: np.empty(part.size, np.uint8) for part in header.parts}
        run(read_jobs(path, header, outs))
    name = header.name
    n = name.end if isinstance(name, SegmentName) else name.n
    size, is_state, made = header.offsets[-1], isinstance(name, StateName), header.created
    return Record(path.parent.name, path.name, n, size, header.parent, is_state, header.exact, made, made)


def _is_fingerprint(name: str) -> bool:
    try:
        return bool(check_fingerprint(name))
    except ValueError:
        return False


def _label(key: Key) -> str:
    return "/".join(key)
