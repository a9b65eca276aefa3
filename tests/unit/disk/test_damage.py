"""Damage to files or the index is a counted miss, never a wrong snapshot."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import sqlite3
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import zstandard

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.recent import RecentPrompts
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
from pyctl.files.atomic_file import make_private, temp_name, temp_path
from pyctl.prompt import Prompt
from tests.effort import IS_QUICK
from tests.unit.disk.lies import RawFile
from tests.unit.disk.making import (
    ROW,
    DirectStore,
    check_directory,
    check_read,
    conversation,
    on_disk,
)
from tests.unit.engine.drive import ManualClock

Opener = Callable[..., DirectStore]


@pytest.fixture
def made() -> list[Snapshot]:
    return conversation(3)


@pytest.fixture
def store(open_store: Opener, made: list[Snapshot]) -> DirectStore:
    store = open_store()
    for each in made:
        store.write(each)
    return store


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
        assert (left.exists(), written.exists()) == (False, True)


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
    prompts = store.home / PROMPTS
    log = RecentPrompts()
    for seed in range(3):
        log.add(Prompt.of([seed, *range(50)]))
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


@pytest.mark.parametrize(
    "name",
    [RULES, SIZES, MODEL, REPLIES, f"{REPLIES}{OLDER}", f".1-{0:016}.tmp", "prompt", "journal"],
)
def test_no_pipe_is_waited_for(
    name: str, store: DirectStore, open_store: Opener, made: list[Snapshot]
) -> None:
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


def test_links_to_other_directories_are_not_followed(
    open_store: Opener, tmp_path: Path, made: list[Snapshot]
) -> None:
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


def test_what_lies_beside_counts_towards_the_budget(open_store: Opener) -> None:
    store = open_store(budget=12_000)
    (store.home / "replies").write_bytes(bytes(6_000))
    for seed in range(8):
        made = conversation(seed, turns=1)[0]
        assert store.write(made) > 0
        assert (
            sum(path.stat().st_size for path in on_disk(store.directory.path))
            == store.directory.n_bytes
            <= 12_000
        )
    assert (store.home / "replies").exists()
    store.directory.prune(7_000)
    assert store.directory.n_bytes <= 7_000


def test_what_is_written_beside_counts_towards_the_day(
    open_store: Opener, made: list[Snapshot], clock: ManualClock
) -> None:
    store = open_store(daily_bytes=3_000)
    assert store.writer.reserve_write(2_000)
    assert not store.writer.reserve_write(2_000)
    assert store.write(made[0]) == 0
    assert store.writer.reserve_write(900)


def test_an_index_of_an_older_version_is_read_and_stays_readable_for_it(
    store: DirectStore, made: list[Snapshot], open_store: Opener
) -> None:
    store.directory.pin(made[0].prefix.name, True)
    store.touch(made[2].prefix)
    store.close()
    connection = sqlite3.connect(store.directory.path / INDEX)
    connection.execute("ALTER TABLE files DROP COLUMN label")
    connection.commit()
    connection.close()
    store = open_store()
    check_read(store, made[-1])
    entries = {entry.n: entry for entry in store.directory.entries()}
    assert (entries[20].pinned, entries[60].hits, entries[60].label) == (True, 1, "")
    following = conversation(3, turns=4)[-1]
    assert store.write(following, "how it begins \ud800") > 0
    assert {entry.n: entry.label for entry in store.directory.entries()}[80] == "how it begins ?"
    columns = "fingerprint, file, n, n_bytes, needs, state, exact, created, used, hits, pinned"
    connection = sqlite3.connect(store.directory.path / INDEX)
    rows = connection.execute(f"SELECT {columns} FROM files").fetchall()
    connection.execute(
        f"INSERT OR REPLACE INTO files({columns}) VALUES({', '.join('?' * 11)})", rows[0]
    )
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    connection.close()


def test_what_another_process_wrote_is_found_after_a_look(
    open_store: Opener, made: list[Snapshot]
) -> None:
    one = open_store()
    other = open_store()
    one.write(made[0])
    assert not other.contains(made[0].prefix)
    other.directory.refresh()
    check_read(other, made[0])
    one.directory.remove(made[0].prefix.name)
    assert other.read(made[0].prefix, made[0].last_tokens(made[0].n)) is None
    assert not other.contains(made[0].prefix)
    assert other.damaged == 0, "it was only evicted"


def garbage(path: Path) -> None:
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    path.write_bytes(os.urandom(10_000))


def other_schema(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE files(x)")
    connection.execute("PRAGMA user_version = 77")
    connection.close()


@pytest.mark.parametrize(
    "harm",
    [HARM["remove"], garbage, HARM["empty"], lambda path: os.truncate(path, 5000), other_schema],
)
@pytest.mark.parametrize("running", [False, True])
def test_lost_index_is_rebuilt(
    open_store: Opener, made: list[Snapshot], harm: Callable[[Path], None], running: bool
) -> None:
    store = open_store()
    for each in made:
        store.write(each)
    if not running:
        store.close()
    harm(store.directory.path / INDEX)
    if not running:
        store = open_store()
    for each in made:
        found = store.read(each.prefix, each.last_tokens(each.n))
        assert (
            found is None
            or found.last_tokens(found.n).tolist() == each.last_tokens(each.n).tolist()
        )
    assert store.damaged == 0
    store.directory.recover()
    for each in made:
        check_read(store, each)
    check_directory(store)


def test_stale_index(store: DirectStore, made: list[Snapshot], open_store: Opener) -> None:
    store.close()
    home = store.directory.path / "model"
    (path,) = home.glob("20-40-*")
    path.unlink()
    store = open_store()
    assert store.write(made[-1]) == 0, "its own state is there"
    report = store.directory.recover()
    assert report.missing == [f"model/{path.name}"]
    assert store.lengths() == {20}
    check_directory(store)
    assert store.write(made[-1]) > 0
    check_read(store, made[-1])


@pytest.mark.parametrize("lost", [INDEX, "model/20-40-*"])
def test_a_write_replaces_what_vanished(store: DirectStore, lost: str) -> None:
    (path,) = store.directory.path.glob(lost)
    path.unlink()
    following = conversation(3, turns=4)
    assert store.write(following[-1]) > 0
    for each in following if lost == INDEX else following[-1:]:
        check_read(store, each)
    check_directory(store)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_full_disk(
    open_store: Opener, made: list[Snapshot], monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    store = open_store()
    store.write(made[0])
    before = on_disk(store.directory.path)
    real = getattr(os, call)
    calls = itertools.count()

    def full(*args: object) -> object:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space"):
            store.write(made[2])
    assert on_disk(store.directory.path) == before
    check_read(store, made[0])
    check_directory(store)
    assert store.write(made[2]) > 0
    check_directory(store)


def test_small_disk(open_store: Opener, tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", mount], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        store = open_store(directory=mount)
        kept: list[Snapshot] = []

        def fill() -> None:
            for seed in range(200):
                made = conversation(seed, turns=1, step=100)[0]
                store.write(made)
                kept.append(made)

        with pytest.raises(OSError, match=r"space|full|disk"):
            fill()
        assert len(kept) > 3
        assert not [path for path in on_disk(mount) if path.suffix == ".tmp"]
        for made in kept:
            check_read(store, made)
        check_directory(store)
        store.close()
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
