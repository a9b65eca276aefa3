"""Tables of answered chats: sums by kind, reasons, and the worst first."""

from __future__ import annotations

import pytest

from bench.traces.chat_server import Answer
from bench.traces.chat_tables import (
    reason,
    rows_by_kind,
    rows_by_reason,
    rows_of_all,
    worst_rows,
)
from bench.traces.recording import RecordedRequest, Session
from bench.traces.schedule import Turn
from bench.traces.served_chats import ServedChat
from pyctl.cache.request_kind import RequestKind


def served(
    n_evaluated: int,
    floor: int = 100,
    kind: str = "append",
    *,
    n_earlier_reply: int = 0,
    happened: str = "",
    left_at: int | None = None,
) -> ServedChat:
    """Return a chat with a prompt of 10,000 tokens."""
    request = RecordedRequest(3, 0, 0.0, 10_000, 10, 2, 0, RequestKind.APPEND)
    turn = Turn(Session(7, [request]), request, kind)
    answer = Answer({}, 10_000, n_evaluated, 10, 1.5, "ram", left_at, left_at)
    return ServedChat(turn, floor, answer, n_earlier_reply, happened)


@pytest.mark.parametrize(
    ("chat", "why"),
    [
        (served(100), ""),
        (served(90), ""),
        (served(110), "a few tokens at the end"),
        (served(10_000), "nothing was restored"),
        (served(10_000, happened="restart"), "after a restart"),
        (served(600, n_earlier_reply=490), "the last reply is evaluated again"),
        (served(600, n_earlier_reply=90), "resumed before the place where it leaves"),
    ],
)
def test_a_request_above_the_floor_has_a_reason(chat: ServedChat, why: str) -> None:
    assert reason(chat) == why


def test_tables_have_a_row_per_kind_and_reason_and_the_worst_first() -> None:
    """The sums hold all requests, a reason only those above the floor, and the order of the worst
    is by tokens above the floor.
    """
    group = [
        served(100),
        served(400),
        served(5_000),
        served(10_000, 5_000, "rewrite"),
        served(120, kind="second client"),
    ]
    by_kind = rows_by_kind(group)
    assert [row[0] for row in by_kind] == ["append", "rewrite", "second client", "all"]
    assert by_kind[-1] == ["all", "5", "50,000", "5,400", "15,620", "2.893", "7.5"]
    assert rows_by_reason(group) == [
        ["resumed before the place where it leaves", "2", "5,200"],
        ["nothing was restored", "1", "5,000"],
        ["a few tokens at the end", "1", "20"],
    ]
    assert [row[5] for row in worst_rows(group)] == ["10,000", "5,000", "400", "120"]
    assert [row[5] for row in rows_of_all(group)] == ["100", "400", "5,000", "10,000", "120"]


def test_the_worst_show_the_place_that_the_server_reports() -> None:
    (row,) = worst_rows([served(5_000, left_at=4_096)])
    assert row[-2:] == [
        "ram",
        "resumed before the place where it leaves: left a prompt at 4,096, resumed at 4,096",
    ]
