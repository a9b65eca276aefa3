"""Threads of Anthropic's API: a turn has the prompt of a client that sends everything."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.engine.request import Request
from pyctl.errors import EngineError
from tests.unit.chat.toy import chatml_tokenizer
from tests.unit.server.api.test_anthropic import built
from tests.unit.server.fake import Bench, Script, fail, play

CREATE = {"type": "create"}
SYSTEM = "Be kind."
TOOLS = [{"name": "look", "description": "Look", "input_schema": {"type": "object"}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def follow(message: Any) -> dict[str, Any]:
    return {"type": "continue", "previous_message_id": message["id"]}


def reply_of(message: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": message["content"]}


def prompt_texts(bench: Bench) -> list[str]:
    tokenizer = chatml_tokenizer()
    return [
        b"".join(tokenizer.piece(token) for token in request.prompt.tokens.tolist()).decode()
        for request in bench.worker.requests
    ]


def details(response: Any) -> Any:
    return response.json()["error"]["details"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_has_the_prompt_of_a_client_that_sends_everything(stream: bool) -> None:
    bench = Bench(play("Hel", "lo"))

    def ask(**fields: Any) -> Any:
        return built(bench.message_stream(**fields)) if stream else bench.message(**fields)

    head = {"system": SYSTEM, "tools": TOOLS}
    first = ask(messages=[user("Hi")], thread=CREATE, **head)
    second = ask(messages=[user("Who?")], thread=follow(first))
    third = ask(messages=[user("Why?")], thread=follow(second))
    history = [user("Hi"), reply_of(first), user("Who?"), reply_of(second), user("Why?")]
    ask(messages=history, **head)
    *_, threaded, whole = prompt_texts(bench)
    assert "Who?" in whole
    assert threaded == whole
    assert third["id"] != second["id"]


def test_a_thread_is_expected_to_go_on() -> None:
    bench = Bench(play("x"))
    bench.message(thread=CREATE)
    bench.message(thread=CREATE, cache_retention={"prompt_seconds": 7200})
    bench.message()
    seconds = [request.retention.prompt_seconds for request in bench.worker.requests]
    assert seconds == [3600, 7200, 0]


def test_a_thread_goes_on_from_its_newest_reply_only() -> None:
    bench = Bench(play("x"))
    first = bench.message(thread=CREATE)
    bench.message(thread=follow(first))
    response = bench.post("/v1/messages", {"messages": [user("a")], "thread": follow(first)})
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"
    assert details(response) == {"error_code": "thread_not_found"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_thread_is_refused_in_the_words_of_the_sdk(stream: bool) -> None:
    bench = Bench(play("x"))
    body = {"messages": [user("a")], "thread": follow({"id": "m"}), "stream": stream}
    response = bench.post("/v1/messages", body)
    assert response.status_code == 404
    assert response.json()["type"] == "error"
    assert details(response) == {"error_code": "thread_not_found"}
    assert not bench.worker.requests


def test_a_thread_of_another_key_is_unknown() -> None:
    bench = Bench(play("x"))
    first = bench.message(thread=CREATE)
    body = {"messages": [user("a")], "thread": follow(first)}
    other = bench.post("/v1/messages", body, headers={"x-api-key": "other"})
    assert other.status_code == 404
    assert bench.post("/v1/messages", body).status_code == 200


def test_a_thread_that_fails_stays_as_it_was() -> None:
    broken = fail(EngineError("broken"), "a")

    def script(request: Request) -> Script:
        return broken(request) if len(bench.worker.requests) == 2 else play("x")(request)

    bench = Bench(script)
    first = bench.message(thread=CREATE)
    body = {"messages": [user("a")], "thread": follow(first)}
    assert bench.post("/v1/messages", body).status_code == 500
    assert bench.post("/v1/messages", body).status_code == 200


def test_the_head_of_a_thread_is_fixed() -> None:
    bench = Bench(play("x"))
    first = bench.message(thread=CREATE, system=SYSTEM)
    body = {"messages": [user("a")], "thread": follow(first)}
    changed = bench.post("/v1/messages", {**body, "system": "Be brief.", "tools": TOOLS})
    assert changed.status_code == 400
    assert details(changed) == {"error_code": "thread_fingerprint_mismatch"}
    assert "'system' and 'tools'" in changed.json()["error"]["message"]
    assert bench.post("/v1/messages", {**body, "system": SYSTEM}).status_code == 200


@pytest.mark.parametrize("field", [{"cache_prompt": False}, {"fallbacks": [{"model": "b"}]}])
def test_what_no_thread_can_have_is_refused(field: dict[str, Any]) -> None:
    bench = Bench(play("x"))
    response = bench.post("/v1/messages", {"messages": [user("a")], "thread": CREATE, **field})
    assert response.status_code == 400
    assert details(response) == {
        "error_code": "thread_unsupported_request",
        "unsupported": list(field),
    }


def test_a_conversation_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyctl.server.threads.MAX_ONE_THREAD", 1500)
    bench = Bench(play("x"))
    first = bench.message(thread=CREATE)
    body = {"messages": [user("a" * 1500)], "thread": follow(first)}
    response = bench.post("/v1/messages", body)
    assert response.status_code == 400
    assert details(response) == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize(
    "thread",
    [
        "create",
        {},
        {"type": "fork"},
        {"type": "continue"},
        {"type": "continue", "previous_message_id": 7},
    ],
)
def test_a_thread_that_makes_no_sense_is_refused(thread: Any) -> None:
    bench = Bench(play("x"))
    response = bench.post("/v1/messages", {"messages": [user("a")], "thread": thread})
    assert response.status_code == 400
    assert "details" not in response.json()["error"]


def test_the_messages_of_a_turn_are_a_list() -> None:
    response = Bench(play("x")).post("/v1/messages", {"messages": "hi", "thread": CREATE})
    assert response.status_code == 400


def test_a_turn_without_a_reply_is_kept() -> None:
    """A client may fill the cache with the first turn, and continue from there."""
    bench = Bench(play())
    first = bench.message(messages=[user("Hi")], thread=CREATE, max_tokens=0)
    bench.message(messages=[user("Who?")], thread=follow(first))
    bench.message(messages=[user("Hi"), user("Who?")])
    *_, threaded, whole = prompt_texts(bench)
    assert threaded == whole
