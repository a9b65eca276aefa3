"""The file of remembered replies."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.chat.replay import Replay
from pyctl.chat.replay_log import ReplayLog, SampledReply
from pyctl.prompt import as_tokens
from tests.effort import examples

Message = dict[str, Any]

AT = b"a place"
HI: Message = {"role": "user", "content": "Hi"}


def sampled(text: str) -> SampledReply:
    return SampledReply(
        header="head", text=text, tokens=as_tokens([5, 6]), ids=("id",), reasoning=b"digest"
    )


def test_a_reply_is_read_as_it_was_appended(tmp_path: Path) -> None:
    log = ReplayLog(tmp_path / "replies", 2**20)
    log.append(b"key", sampled("raw \n \ud800"))
    ((key, reply),) = ReplayLog(tmp_path / "replies", 2**20).read()
    assert key == b"key"
    assert reply.text == "raw \n \ud800"
    assert reply.header == "head"
    assert reply.tokens is not None
    assert reply.tokens.tolist() == [5, 6]
    assert reply.ids == ("id",)
    assert reply.reasoning == b"digest"


def test_a_reply_is_appended_once(tmp_path: Path) -> None:
    log = ReplayLog(tmp_path / "replies", 2**20)
    reply = sampled("raw")
    log.append(b"key", reply)
    size = log.n_bytes
    assert log.has(reply)
    log.append(b"key", reply)
    assert log.n_bytes == size


def test_a_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = ReplayLog(tmp_path / "missing" / "replies", 2**20)
    reply = sampled("raw")
    log.append(b"key", reply)
    assert "cannot write a remembered reply" in caplog.text
    assert not log.has(reply)


def test_replies_outlive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "replies"
    replay = Replay(path=path)
    message = {"role": "assistant", "content": "It rains.", "reasoning_content": "hm \ud800"}
    replay.remember(message, AT, "head", "raw \ud800", as_tokens([5, 6]))
    replay.remember({"role": "assistant", "content": "Bye."}, AT, "head", "raw", None)
    again = Replay(path=path)
    assert again.n_bytes == replay.n_bytes
    found = again.find(message, AT)
    assert found.text == "raw \ud800"
    assert found.tokens.tolist() == [5, 6]
    assert Replay("off", path=path).find(message, AT) is None


@given(st.data())
@settings(max_examples=examples(60))
def test_a_damaged_file_loses_the_damaged_lines_only(data: st.DataObject) -> None:
    """A line that is cut off or overwritten anywhere costs only the reply in it. The others are
    found, and the file takes new ones.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "replies"
        replay = Replay(path=path)
        messages: list[Message] = [{"role": "assistant", "content": f"reply {i}"} for i in range(4)]
        for message in messages:
            replay.remember(message, AT, "head", "raw", None)
        lines = path.read_bytes().splitlines(keepends=True)
        hit = data.draw(st.integers(0, 3))
        cut = data.draw(st.integers(0, len(lines[hit]) - 2))
        junk = data.draw(st.binary(max_size=20)).replace(b"\n", b"")
        path.write_bytes(
            b"".join(lines[:hit]) + lines[hit][:cut] + junk + b"\n" + b"".join(lines[hit + 1 :])
        )
        again = Replay(path=path)
        found = [again.find(message, AT) is not None for message in messages]
        assert all(found[:hit] + found[hit + 1 :])
        again.remember({"role": "assistant", "content": "new"}, AT, "head", "raw", None)
        assert Replay(path=path).find({"role": "assistant", "content": "new"}, AT) is not None


def test_a_line_that_was_cut_off_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "replies"
    path.write_bytes(b'{"key":"00')
    Replay(path=path).remember(HI | {"role": "assistant"}, AT, "head", "raw", None)
    assert Replay(path=path).find(HI | {"role": "assistant"}, AT) is not None


def replied(number: int) -> Message:
    return {"role": "assistant", "content": str(number)}


def bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def test_the_files_are_bounded_at_all_times_and_what_is_in_use_stays(tmp_path: Path) -> None:
    path = tmp_path / "replies"
    replay = Replay(max_bytes=20_000, path=path, max_file_bytes=10_000)
    for number in range(400):
        replay.remember(replied(number), AT, "head", "raw " * 20, None)
        assert bytes_in(tmp_path) <= 10_000
        assert replay.find(replied(0), AT) is not None
    replay.remember(replied(400), AT, "head", "raw " * 4000, None)
    assert bytes_in(tmp_path) <= 10_000, "one that is too long drives nothing out"
    again = Replay(max_bytes=20_000, path=path, max_file_bytes=10_000)
    kept = [number for number in range(400) if again.find(replied(number), AT) is not None]
    assert kept[0] == 0, "in use all the time"
    assert kept[1:] == list(range(kept[1], 400))
    assert len(kept) > 10


def test_files_of_a_larger_limit_are_cut_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "replies"
    replay = Replay(path=path)
    for number in range(200):
        replay.remember(replied(number), AT, "head", "raw " * 20, None)
    before = bytes_in(tmp_path)
    again = Replay(max_bytes=20_000, path=path)
    assert bytes_in(tmp_path) < 20_000 < before
    assert again.find(replied(199), AT) is not None
    assert again.find(replied(0), AT) is None


def test_a_slow_disk_holds_up_nobody_who_remembers_or_looks_up(tmp_path: Path) -> None:
    """Replies are found at once while their lines wait for the disk. At most 256 lines wait, so a
    disk that hangs cannot fill the RAM.
    """
    waiting: list[Callable[[], None]] = []
    path = tmp_path / "replies"
    place = AT
    replay = Replay("equal", path=path, run_soon=waiting.append)
    messages = [{"role": "assistant", "content": f"reply {number}"} for number in range(400)]
    for message in messages:
        replay.remember(message, place, "head\n", "text", None)
        assert replay.find(message, place) is not None
    assert not path.exists(), "nothing was written by who asked"
    for write in waiting:
        write()
    again = Replay("equal", path=path)
    found = [again.find(message, place) is not None for message in messages]
    assert found == [True] * 256 + [False] * 144, "no more can wait"
    waiting.clear()
    replay.find(messages[0], place)
    assert not waiting, "what is in the file is not written again"
    replay.find(messages[-1], place)
    assert len(waiting) == 1, "what is in use is"


def test_replies_beyond_the_day_s_bytes_are_not_written(tmp_path: Path) -> None:
    spent: list[int] = []

    def spend(n_bytes: int) -> bool:
        spent.append(n_bytes)
        return len(spent) <= 2

    path = tmp_path / "replies"
    place = AT
    replay = Replay("equal", path=path, spend=spend)
    for number in range(4):
        replay.remember(
            {"role": "assistant", "content": f"reply {number}"}, place, "head\n", "text", None
        )
    assert len(spent) == 4
    assert path.stat().st_size == sum(spent[:2])
    assert replay.find({"role": "assistant", "content": "reply 3"}, place) is not None
