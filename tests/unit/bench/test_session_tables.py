"""The rows of the tables about the sessions of programs."""

from __future__ import annotations

from typing import Any

from bench.clients.fields import MESSAGES
from bench.clients.recording_proxy import Recorded
from bench.clients.session import Taken
from bench.clients.session_tables import beta_line, field_rows, refusals, session_rows

BODY: dict[str, Any] = {
    "model": "any",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "Hi"}],
}


def recorded(path: str = MESSAGES, status: int = 200, **fields: Any) -> Recorded:
    headers = {"anthropic-beta": "b-2,a-1"}
    return Recorded(path, {**BODY, **fields}, headers, status, n_cached=7, n_evaluated=2)


def taken(*requests: Recorded) -> tuple[Taken, ...]:
    return (Taken("a command", requests),)


def test_a_request_is_a_row_with_its_tokens() -> None:
    (row,) = session_rows("claude", taken(recorded()))
    assert row[0] == "claude"
    assert row[2:] == ("a command", "9", "7", "2")


def test_counts_of_tokens_are_one_row() -> None:
    count = Recorded(f"{MESSAGES}/count_tokens", BODY, {}, 200)
    (row,) = session_rows("claude", taken(count, count))
    assert row[3] == "2 x `count_tokens`"


def test_the_names_of_betas_are_sorted() -> None:
    assert beta_line({"claude": taken(recorded())}) == [
        "`anthropic-beta` of Claude Code: `a-1`, `b-2`"
    ]


def test_an_unknown_field_is_reported() -> None:
    _, unknown = field_rows({"claude": taken(recorded(of_tomorrow=1))})
    assert unknown == ["claude: of_tomorrow is dropped without a reason"]


def test_a_field_without_an_effect_has_its_reason() -> None:
    rows, unknown = field_rows({"claude": taken(recorded())})
    assert unknown == []
    (row,) = (row for row in rows if row[1] == "the body")
    assert "`max_tokens`" in row[2]
    assert "`model`: chooses the model" in row[3]


def test_a_refusal_is_reported() -> None:
    assert list(refusals(taken(recorded(status=400)))) == [
        "a command: /v1/messages was answered with 400"
    ]
