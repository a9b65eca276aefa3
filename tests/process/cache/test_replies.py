"""The files of remembered replies under several processes, and under one that is killed."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from pathlib import Path

from pyctl.chat.replay import Replay

AT = b"a place"


def remember(replay: Replay, number: int) -> None:
    replay.remember({"role": "assistant", "content": str(number)}, AT, "head", "raw", None)


def remember_many(path: str, first: int) -> None:
    replay = Replay(path=Path(path), max_file_bytes=20_000)
    for number in range(first, first + 300):
        remember(replay, number)


def bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def test_several_processes_share_the_files(tmp_path: Path) -> None:
    path = tmp_path / "replies"
    spawn = multiprocessing.get_context("spawn")
    children = [spawn.Process(target=remember_many, args=(str(path), first)) for first in (0, 1000)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    lines = [
        json.loads(line) for each in tmp_path.iterdir() for line in each.read_bytes().splitlines()
    ]
    assert 60 < len(lines) < 600
    assert bytes_in(tmp_path) <= 20_000


def remember_for_ever(path: str, ready: object) -> None:
    replay = Replay(path=Path(path), max_file_bytes=20_000)
    for number in itertools.count():
        remember(replay, number)
        if number == 200:
            ready.set()  # type: ignore[attr-defined]


def test_a_kill_loses_at_most_the_line_being_written(tmp_path: Path) -> None:
    path = tmp_path / "replies"
    spawn = multiprocessing.get_context("spawn")
    for _ in range(3):
        ready = spawn.Event()
        child = spawn.Process(target=remember_for_ever, args=(str(path), ready), daemon=True)
        child.start()
        assert ready.wait(120)
        child.kill()
        child.join(120)
        assert {each.name for each in tmp_path.iterdir()} <= {"replies", "replies.older"}
        assert bytes_in(tmp_path) <= 20_000
        lines = [line for each in tmp_path.iterdir() for line in each.read_bytes().splitlines()]
        assert Replay(path=path, max_file_bytes=20_000).n_bytes > 0
        assert sum(line.endswith(b"}") for line in lines) >= len(lines) - 1
