"""Diagnostics of messages: what Anthropic calls the reason of a miss, and the tokens missed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.api.test_anthropic import built
from tests.unit.server.fake import Bench, play

LONG = {"role": "user", "content": "word " * 200}
TOOLS = [{"name": "look", "input_schema": {"type": "object"}}]


def asking(previous: Any) -> dict[str, Any]:
    message_id = previous if previous is None else previous["id"]
    return {"diagnostics": {"previous_message_id": message_id}}


def reason(message: Any) -> Any:
    return message["diagnostics"]["cache_miss_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_changed_part_is_named_with_its_tokens(stream: bool) -> None:
    bench = Bench(play("x", cached=5))

    def ask(**fields: Any) -> Any:
        return built(bench.message_stream(**fields)) if stream else bench.message(**fields)

    first = ask(messages=[LONG], **asking(None))
    assert first["diagnostics"] is None
    second = ask(messages=[LONG], system="Be kind.", **asking(first))
    assert reason(second)["type"] == "system_changed"
    n_first = bench.worker.requests[0].prompt.end
    assert reason(second)["cache_missed_input_tokens"] == n_first - 5
    third = ask(messages=[LONG], system="Be kind.", tools=TOOLS, **asking(second))
    assert reason(third)["type"] == "tools_changed"
    other = {"role": "user", "content": "other"}
    fourth = ask(messages=[other], system="Be kind.", tools=TOOLS, **asking(third))
    assert reason(fourth)["type"] == "messages_changed"


def test_a_prompt_that_resumes_has_no_reason() -> None:
    bench = Bench()
    first = bench.message(max_tokens=1, **asking(None))
    second = bench.message(max_tokens=1, **asking(first))
    assert second["diagnostics"] is None


def test_an_unknown_message_is_not_found() -> None:
    message = Bench(play("x")).message(**asking({"id": "m"}))
    assert reason(message) == {"type": "previous_message_not_found"}


def test_what_has_no_name_is_unavailable() -> None:
    bench = Bench(play("x", cached=5))
    first = bench.message(messages=[LONG], **asking(None))
    changed = bench.message(messages=[LONG], thinking={"type": "disabled"}, **asking(first))
    assert reason(changed) == {"type": "unavailable"}


def test_without_a_request_there_is_no_diagnosis_and_no_record() -> None:
    bench = Bench(play("x"))
    first = bench.message()
    assert "diagnostics" not in first
    assert reason(bench.message(**asking(first)))["type"] == "previous_message_not_found"


@pytest.mark.parametrize("diagnostics", ["yes", [], {"previous_message_id": 7}])
def test_a_diagnosis_that_makes_no_sense_is_refused(diagnostics: Any) -> None:
    body = {"messages": [LONG], "diagnostics": diagnostics}
    assert Bench(play("x")).post("/v1/messages", body).status_code == 400
