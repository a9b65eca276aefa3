"""Harm to the files of a store, and what a lookup then finds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from pyctl.cache.snapshot import Snapshot
from tests.unit.disk.making import (
    DirectStore,
    check_directory,
    check_read,
    on_disk,
)


def file_of(store: DirectStore, start: str, suffix: str) -> Path:
    (path,) = (
        path
        for path in on_disk(store.directory.path)
        if path.name.startswith(start) and path.suffix == suffix
    )
    return path


def check_lost(store: DirectStore, made: list[Snapshot], lost: list[bool]) -> None:
    """Check, deepest first as a lookup would, that those in ``lost`` miss and the others come back;
    damage counts once.
    """
    assert store.damaged == 0
    for each, gone in reversed(list(zip(made, lost, strict=True))):
        if gone:
            assert store.read(each.prefix, each.last_tokens(each.n)) is None
            assert not store.contains(each.prefix)
        else:
            check_read(store, each)
    assert store.damaged == 1
    check_directory(store)
    for each in made:
        store.write(each)
        check_read(store, each)
    check_directory(store)


def replaced(by: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: (path.rename(path.parents[2] / path.name), by(path))


HARM: dict[str, Callable[[Path], object]] = {
    "truncate": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "cut the header": lambda path: os.truncate(path, 60),
    "grow": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "fill with zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "zero the tail": lambda path: (
        os.truncate(path, (n := path.stat().st_size) // 2),
        os.truncate(path, n),
    ),
    "make a directory": replaced(Path.mkdir),
    "make a pipe": replaced(os.mkfifo),
    "remove": lambda path: path.unlink(),
    "dangle": replaced(lambda path: path.symlink_to("nowhere")),
    "lead away": replaced(lambda path: path.symlink_to(path.parents[2] / path.name)),
}
