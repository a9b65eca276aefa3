"""Checks of a cache directory: what they report, what they repair, and what they leave alone."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.recent import RecentPrompts
from pyctl.cache.snapshot import Snapshot
from pyctl.disk.file_format import (
    PROMPTS,
    PromptName,
)
from pyctl.disk.recent_files import RecentFiles
from pyctl.files.atomic_file import make_private, temp_name, temp_path
from pyctl.prompt import Prompt
from tests.effort import IS_QUICK
from tests.unit.disk.harm import HARM, check_lost, file_of
from tests.unit.disk.lies import RawFile
from tests.unit.disk.making import (
    ROW,
    DirectStore,
    check_directory,
    check_read,
    on_disk,
)

Opener = Callable[..., DirectStore]


def change(file: RawFile, index: int, data: bytes, **fields: Any) -> None:
    """Let part ``index`` hold ``data``, and its fields say so unless ``fields`` say something
    else.
    """
    file.parts[index] = replace(file.parts[index], pieces=[data], **{"size": len(data), **fields})


def rows_out_of_nothing(file: RawFile) -> None:
    change(file, 2, b"", codec=1, size=2**36)
    file.parts[2].pieces = [zstandard.compress(b"x")] * (2**36 // file.parts[2].chunk + 1)


LIES: dict[str, Callable[[RawFile], None]] = {
    "odd ends": lambda rows: change(rows, 1, b"\1\0\0\0\2"),
    "falling ends": lambda rows: change(rows, 1, struct.pack("<2I", 60, 50)),
    "ends of others": lambda rows: change(rows, 1, struct.pack("<2I", 50, 61)),
    "many ends": lambda rows: change(rows, 1, bytes(4 * 21)),
    "other tokens": lambda rows: change(rows, 0, bytes(80)),
    "fewer rows": lambda rows: change(rows, 2, rows.parts[2].pieces[0][:-48]),
    "rows out of nothing": rows_out_of_nothing,
    "large chunks": lambda rows: change(rows, 2, rows.parts[2].pieces[0], chunk=2**31),
    "made at no time": lambda rows: setattr(rows, "created", float("nan")),
    "a larger state": lambda state: change(state, 0, state.parts[0].pieces[0] + b"x"),
}


@pytest.mark.parametrize(
    "lie", [each for each in LIES if not (IS_QUICK and each == "large chunks")]
)
def test_valid_checksums_over_wrong_numbers_are_found_by_verify(
    open_store: Opener, made: list[Snapshot], lie: str
) -> None:
    store = open_store(sizes=BlockSizes(0, ROW, 500))
    for each in made:
        store.write(each)
    path = file_of(store, "60", ".state") if "state" in lie else file_of(store, "40-60", ".rows")
    file = RawFile.read(path)
    LIES[lie](file)
    path.write_bytes(file.pack())
    assert path.name in "".join(store.directory.verify().broken), "verify knows without the model"
    check_lost(store, made, [False, False, True])


@pytest.mark.parametrize("harm", [*HARM, None])
def test_recovery_finds_what_shows_without_reading_all(
    store: DirectStore, made: list[Snapshot], harm: str | None
) -> None:
    if harm is not None:
        HARM[harm](file_of(store, "20-40", ".rows"))
    store.directory.recover()
    if harm == "zero the tail":
        check_lost(store, made, [False, True, True])
        return
    assert store.lengths() == ({20, 40, 60} if harm is None else {20})
    assert store.damaged == 0
    check_directory(store)


@pytest.mark.parametrize("harm", HARM)
def test_verify_reports_and_fixes(store: DirectStore, harm: str) -> None:
    assert store.directory.verify().is_consistent
    HARM[harm](file_of(store, "20-40", ".rows"))
    before = on_disk(store.directory.path)
    assert not store.directory.verify().is_consistent
    assert on_disk(store.directory.path) == before
    store.directory.verify(fix=True)
    check_directory(store)
    assert store.lengths() == {20}


def test_foreign_files_stay_and_do_not_count(store: DirectStore, made: list[Snapshot]) -> None:
    home = store.directory.path / "model"
    names = ["README", "5-abc.state", "1-2.rows", ".x.tmp", "0-20-" + "0" * 32 + ".rows"]
    for name in names:
        (home / name).write_bytes(b"x" * 99)
    (store.directory.path / "note").write_bytes(b"x")
    before = store.directory.n_bytes
    report = store.directory.recover()
    assert len(report.foreign) == len(names)
    assert store.directory.n_bytes == before
    assert all((home / name).exists() for name in names)
    check_read(store, made[-1])


def test_garbage_under_a_good_name_is_removed(store: DirectStore) -> None:
    path = store.directory.path / "model" / f"99-{'0' * 32}.state"
    path.write_bytes(os.urandom(5000))
    assert store.directory.recover().broken == [f"model/{path.name}"]
    assert not path.exists()
    check_directory(store)


def test_temp_files_go_with_their_writer(store: DirectStore) -> None:
    left = store.home / temp_name()
    left.write_bytes(b"half")
    with temp_path(store.home) as written:
        report = store.directory.recover()
        assert report.temps == [f"model/{left.name}"]
        assert not left.exists()
        assert written.exists()


def test_leftovers_of_older_versions_go(store: DirectStore, made: list[Snapshot]) -> None:
    home = store.home
    names = ["recent", "words", "recent.77.tmp", "replies.77.tmp", "words.77.tmp"]
    for name in [*names, "replies", "replies.older"]:
        (home / name).write_bytes(b"x" * 10)
    assert not store.directory.verify().is_consistent
    assert sorted(store.directory.verify(fix=True).temps) == [
        f"model/{name}" for name in sorted(names)
    ]
    assert store.directory.verify().is_consistent
    assert (home / "replies").exists()
    assert (home / "replies.older").exists()
    assert store.directory.n_bytes == sum(
        path.stat().st_size for path in on_disk(store.directory.path)
    )
    check_read(store, made[-1])


def test_prompts_are_checked_with_the_rest(store: DirectStore) -> None:
    """`verify` reports damaged prompts, temporary files of dead processes, and foreign files.
    Fixing removes the first two and leaves files that pyctl did not write.
    """
    prompts = store.home / PROMPTS
    log = RecentPrompts()
    for seed in range(3):
        log.add(Prompt.from_ids([seed, *range(50)]))
    RecentFiles(prompts).save(log.newest_first())
    first, second, third = sorted(prompts.iterdir())
    first.write_bytes(second.read_bytes()[:-1])
    (prompts / "note").write_bytes(b"x")
    child = subprocess.Popen(["true"])
    child.wait()
    (prompts / f".{child.pid}-{'0' * 16}.tmp").write_bytes(b"half")
    report = store.directory.verify()
    assert report.broken == [f"model/prompts/{first.name}"]
    assert report.temps == [f"model/prompts/.{child.pid}-{'0' * 16}.tmp"]
    assert report.foreign == ["model/prompts/note"]
    store.directory.verify(fix=True)
    assert sorted(prompts.iterdir()) == sorted([second, third, prompts / "note"])
    assert store.directory.verify().is_consistent


def test_links_to_other_directories_are_not_followed(
    open_store: Opener, tmp_path: Path, made: list[Snapshot]
) -> None:
    """Recovery, verification and sizes follow no link to files of another directory, which they
    could remove, and a store in a linked directory is refused.
    """
    theirs = open_store("theirs", directory=tmp_path / "theirs")
    ours = open_store("ours")
    theirs.write(made[0])
    prompt = theirs.home / PROMPTS / str(PromptName.new(1))
    make_private(prompt.parent)
    prompt.write_bytes(b"damaged")
    (file_of(theirs, "20", ".state")).write_bytes(b"damaged")
    (ours.directory.path / "theirs").symlink_to(theirs.home)
    (ours.home / PROMPTS).symlink_to(prompt.parent)
    before = sorted(tmp_path.glob("theirs/**/*"))
    ours.directory.recover()
    assert ours.directory.verify(fix=True).is_consistent
    assert RecentFiles(ours.home / PROMPTS).load() == []
    assert ours.directory.auxiliary_bytes() == 0
    assert sorted(tmp_path.glob("theirs/**/*")) == before
    with pytest.raises(OSError, match="a link"):
        open_store("theirs")
