"""Damage to files or the index is a counted miss, never a wrong snapshot."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from pyctl.cache.snapshot import Snapshot
from pyctl.chat.replay_log import ReplayLog, SampledReply
from pyctl.disk.directory import model_in
from pyctl.disk.file_format import (
    INDEX,
    MODEL,
    OLDER,
    PROMPTS,
    REPLIES,
    RULES,
    SIZES,
    PromptName,
    header_size,
)
from pyctl.disk.recent_files import RecentFiles
from pyctl.disk.segment_files import read_header
from pyctl.files.atomic_file import make_private
from tests.unit.disk.harm import HARM, check_lost, file_of
from tests.unit.disk.making import (
    DirectStore,
    check_directory,
    check_read,
)

Opener = Callable[..., DirectStore]


def positions(path: Path) -> Iterator[int]:
    """Yield a byte of every class: prelude, fields, names, part table, header checksum, each part,
    tail.
    """
    header = read_header(path)
    yield from (0, 8, 10, 11, 12, 16, 24, 32, 40, 50, 70, 85, 95)
    size = header_size(header)
    yield from range(100, size - 8, 7)
    yield from (size - 8, size - 1)
    yield from header.offsets[:-1]
    yield path.stat().st_size - 1


@pytest.mark.parametrize("suffix", [".rows", ".state"])
@pytest.mark.parametrize("mask", [1, 0x80, 0xFF])
def test_flipped_bytes(store: DirectStore, made: list[Snapshot], suffix: str, mask: int) -> None:
    last = made[-1]
    path = file_of(store, "40-60" if suffix == ".rows" else "60", suffix)
    whole = path.read_bytes()
    for n, at in enumerate(positions(path), 1):
        broken = bytearray(whole)
        broken[at] ^= mask
        path.write_bytes(broken)
        assert store.read(last.prefix, last.last_tokens(last.n)) is None, f"byte {at}"
        assert store.damaged == n
        assert not path.exists()
        assert store.write(last) > 0
    check_read(store, last)
    check_directory(store)


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize(
    ("start", "suffix", "lost"),
    [
        ("60", ".state", [False, False, True]),
        ("40-60", ".rows", [False, False, True]),
        ("20-40", ".rows", [False, True, True]),
        ("0-20", ".rows", [True, True, True]),
    ],
)
def test_harm(
    store: DirectStore, made: list[Snapshot], harm: str, start: str, suffix: str, lost: list[bool]
) -> None:
    HARM[harm](file_of(store, start, suffix))
    check_lost(store, made, lost)


AWAY = [
    OSError(number, "away")
    for number in (errno.EACCES, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN)
]


@pytest.mark.parametrize("call", ["pread", "preadv"])
@pytest.mark.parametrize("error", [*AWAY, ZeroDivisionError()], ids=repr)
def test_failed_read_is_a_miss_and_drops_file_if_drive_is_there(
    store: DirectStore, made: list[Snapshot], error: Exception, call: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, Mock(side_effect=error))
        assert store.read(made[-1].prefix, made[-1].last_tokens(made[-1].n)) is None
    assert store.damaged == (error not in AWAY)
    assert store.contains(made[-1].prefix) == (error in AWAY)
    check_read(store, made[1])
    store.write(made[-1])
    check_read(store, made[-1])


@pytest.mark.parametrize("suffix", [".rows", ".state"])
def test_swapped_files(store: DirectStore, made: list[Snapshot], suffix: str) -> None:
    one = file_of(store, "20-40" if suffix == ".rows" else "40", suffix)
    two = file_of(store, "40-60" if suffix == ".rows" else "60", suffix)
    temp = one.with_name("temp")
    one.rename(temp)
    two.rename(one)
    temp.rename(two)
    for each in reversed(made[1:]):
        assert store.read(each.prefix, each.last_tokens(each.n)) is None
    assert store.damaged == 2
    check_read(store, made[0])
    check_directory(store)


def test_files_of_another_model_under_our_name(open_store: Opener, made: list[Snapshot]) -> None:
    theirs = open_store("theirs")
    ours = open_store("ours")
    for each in made:
        ours.write(each)
        theirs.write(each)
    (path,) = (ours.directory.path / "ours").glob("60-*.state")
    shutil.copy(ours.directory.path / "theirs" / path.name, path)
    check_lost(ours, made, [False, False, True])


@pytest.mark.parametrize(
    "name",
    [RULES, SIZES, MODEL, REPLIES, f"{REPLIES}{OLDER}", f".1-{0:016}.tmp", "prompt", "journal"],
)
def test_no_pipe_is_waited_for(
    name: str, store: DirectStore, open_store: Opener, made: list[Snapshot]
) -> None:
    """A named pipe in place of any file of the cache is skipped or refused at once. Opening it like
    a file would hang the server forever.
    """
    prompt = PromptName.new(1)
    special = {
        "prompt": store.home / PROMPTS / str(prompt),
        "journal": store.directory.path / f"{INDEX}-journal",
    }
    path = special.get(name, store.home / name)
    make_private(path.parent)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    if name == "journal":
        with pytest.raises(OSError, match="not a regular file"):
            open_store()
        return
    replies = ReplayLog(store.home / REPLIES, 2**20)
    replies.append(b"key", SampledReply("", "text", None, (), b""))
    assert [reply.text for _, reply in replies.read()] == ["text"] * (name != REPLIES)
    assert RecentFiles(store.home / PROMPTS).load() == []
    store.directory.verify(fix=True)
    assert model_in(store.directory.path, "model") == "model"
    check_read(open_store(), made[-1])
