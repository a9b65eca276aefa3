"""Checks of a cache directory, index against files and files against index, and repairs."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias

from pyctl.cache.block_sizes import BlockSizes
from pyctl.disk.chain import Runner, open_chain
from pyctl.disk.file_format import (
    MAX_NAME_BYTES,
    MODEL,
    OLDER,
    PROMPTS,
    QUARANTINE,
    REPLIES,
    RULES,
    SIZES,
    CorruptFileError,
    Header,
    PromptName,
    StateName,
    is_fingerprint,
    is_obsolete,
    parse,
    parse_sizes,
)
from pyctl.disk.graph import FileGraph
from pyctl.disk.index import Index, Key, Record, file_path
from pyctl.disk.recent_files import read_prompt
from pyctl.disk.segment_files import check_jobs, read_header, remove_file
from pyctl.files.atomic_file import files_in, is_abandoned, read_regular, temp_pid

__all__ = ["VerifiedFiles", "is_fingerprint_dir", "read_record", "verify"]

Connect: TypeAlias = Callable[[], AbstractContextManager[sqlite3.Connection]]


@dataclass
class VerifiedFiles:
    """The findings of a check, each as ``<fingerprint>/<file>``.

    Attributes:
        files: The number of whole files.
        n_bytes: The bytes of whole files.
        missing: Entries of the index without a file.
        unknown: Whole files that were not in the index.
        broken: Damaged files.
        useless: Segments that no state needs, and files on an incomplete chain.
        temps: Files of ended processes and of older versions.
        foreign: Files of other programs, which stay.
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
    def is_consistent(self) -> bool:
        """True if index and files agree, and every byte that was read is right."""
        return not (self.missing or self.unknown or self.broken or self.useless or self.temps)


def verify(
    directory: Path, reading: Connect, repairing: Connect | None, run: Runner | None
) -> VerifiedFiles:
    """Compare, reading headers or, with ``run`` to run jobs, every byte and all names; a file that
    a restore would refuse is broken. OSError, sqlite3.Error.

    ``reading`` opens the index, ``repairing`` a transaction on it; None to repair nothing. Reading
    blocks no other process; a file that changed meanwhile is checked again before it is repaired.
    """
    report = VerifiedFiles()
    sizes = cache(read_sizes)
    whole: dict[Key, Record] = {}
    broken: list[Key] = []
    with reading() as connection:
        indexed = {record.key for record in Index.records(connection)}
    fix = repairing is not None
    for path, key in _ours(directory, report, fix, deep=run is not None):
        try:
            whole[key] = read_record(path, read_header(path, sizes(path.parent)), run)
        except FileNotFoundError:
            continue
        except CorruptFileError:
            broken.append(key)
    if run is not None:
        broken += _broken_chains(directory, whole, sizes, run)
    report.broken += map(_label, broken)
    if repairing is not None:
        with repairing() as connection:
            _apply(directory, connection, whole, broken, report)
    else:
        report.missing = sorted(map(_label, indexed - whole.keys() - set(broken)))
        report.unknown = sorted(map(_label, whole.keys() - indexed))
        report.useless = sorted(map(_label, FileGraph(whole.values()).invalid_keys()))
    report.files = len(whole)
    report.n_bytes = sum(record.n_bytes for record in whole.values())
    return report


def is_fingerprint_dir(path: Path) -> bool:
    """Return whether ``path`` is a directory of the files of a fingerprint. A link is not: its
    files may belong to another directory.
    """
    return is_fingerprint(path.name) and path.is_dir() and not path.is_symlink()


def read_sizes(home: Path) -> BlockSizes | None:
    """Return the sizes of blocks in the files of ``home``; None if unknown."""
    try:
        return parse_sizes(read_regular(home / SIZES, MAX_NAME_BYTES).decode("ascii"))
    except (OSError, ValueError):
        return None


def _broken_chains(
    directory: Path,
    whole: dict[Key, Record],
    sizes: Callable[[Path], BlockSizes | None],
    run: Runner,
) -> list[Key]:
    """Remove from ``whole`` the files whose tokens or ends do not match their names, and return
    them.
    """
    broken = []
    for fingerprint, name in list(whole):
        if not isinstance(name, StateName) or (fingerprint, name) not in whole:
            continue
        home = directory / fingerprint
        with suppress(FileNotFoundError):
            try:
                open_chain(home, name, sizes(home), run)
            except CorruptFileError as error:
                found = parse(error.file)
                if found is not None and whole.pop((fingerprint, found), None) is not None:
                    broken.append((fingerprint, found))
    return broken


def _apply(
    directory: Path,
    connection: sqlite3.Connection,
    whole: dict[Key, Record],
    broken: list[Key],
    report: VerifiedFiles,
) -> None:
    """Repair the index and the directory, and enter the differences into ``report``.

    Files come before the graph: damaged and missing ones leave the index, and unknown ones enter
    it. Only then does the graph show which files depend on something that is gone.
    """
    for key in broken:
        Index.delete(connection, key)
        remove_file(file_path(directory, key))
    indexed = {record.key: record for record in Index.records(connection)}
    for key in indexed.keys() - whole.keys():
        if not file_path(directory, key).is_file():
            Index.delete(connection, key)
            report.missing.append(_label(key))
    for key, record in list(whole.items()):
        if not file_path(directory, key).exists():
            del whole[key]
        elif (
            key not in indexed
            or indexed[key].n_bytes != record.n_bytes
            or indexed[key].parent != record.parent
        ):
            Index.insert(connection, record)
            report.unknown.append(_label(key))
    for key in FileGraph(Index.records(connection)).invalid_keys():
        Index.delete(connection, key)
        remove_file(file_path(directory, key))
        whole.pop(key, None)
        report.useless.append(_label(key))


def _ours(
    directory: Path, report: VerifiedFiles, fix: bool, deep: bool
) -> Iterator[tuple[Path, Key]]:
    """Yield the files of snapshots, each with its key. Other files that are wrong or left over are
    entered into ``report`` and, with ``fix``, removed.
    """
    for home in sorted(directory.iterdir()):
        if not is_fingerprint_dir(home):
            continue
        for path in sorted([*home.iterdir(), *files_in(home / PROMPTS)]):
            label = str(path.relative_to(directory))
            in_home = path.parent == home
            name = parse(path.name) if in_home else None
            if name is not None:
                yield path, (home.name, name)
            elif in_home and path.name in (
                PROMPTS,
                QUARANTINE,
                REPLIES,
                f"{REPLIES}{OLDER}",
                RULES,
                SIZES,
                MODEL,
            ):
                continue
            elif not in_home and PromptName.parse(path.name):
                if deep and not _is_prompt(path):
                    report.broken.append(label)
                    _remove(path, fix)
            elif is_abandoned(path, remove=fix) or (in_home and is_obsolete(path.name)):
                report.temps.append(label)
                _remove(path, fix)
            elif temp_pid(path.name) is None:
                report.foreign.append(label)


def _remove(path: Path, fix: bool) -> None:
    if fix:
        remove_file(path)


def _is_prompt(path: Path) -> bool:
    try:
        read_prompt(read_regular(path))
    except FileNotFoundError:
        return True  # removed since, like a prompt that was continued
    except (OSError, ValueError):
        return False
    return True


def read_record(path: Path, header: Header, run: Runner | None) -> Record:
    """Return the record of the file at ``path``, of which ``run`` checks every byte.

    Raises CorruptFileError.
    """
    if run is not None:
        run(check_jobs(path, header))
    made = header.created
    return Record(
        path.parent.name,
        header.name,
        header.offsets[-1],
        header.parent,
        header.exact,
        created=made,
        used=made,
    )


def _label(key: Key) -> str:
    return f"{key[0]}/{key[1]}"
