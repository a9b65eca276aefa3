from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.retention import Retention
from pyctl.engine.request import Done, Request, Timings
from pyctl.errors import EngineError
from tests.client import HI
from tests.unit.chat.toy import THINKING
from tests.unit.server.fake import Bench, Script, fail, play
from tests.unit.server.parts import CALLS, split_by_lines


def built(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events of a stream make, in the order that Anthropic's API
    promises.
    """
    start, *rest, delta, stop = events
    assert start["type"] == "message_start"
    assert delta["type"] == "message_delta"
    assert stop == {"type": "message_stop"}
    message: dict[str, Any] = start["message"]
    texts: list[str] = []
    opened = False
    for event in rest:
        at = len(message["content"])
        if event["type"] == "content_block_start":
            assert not opened
            assert event["index"] == at
            message["content"].append(event["content_block"])
            texts = []
            opened = True
            continue
        assert opened
        assert event["index"] == at - 1
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            opened = False
            if block["type"] == "tool_use":
                block["input"] = msgspec.json.decode("".join(texts) or "{}")
        elif event["delta"]["type"] == "input_json_delta":
            assert block["type"] == "tool_use"
            texts.append(event["delta"]["partial_json"])
        elif event["delta"]["type"] == "signature_delta":
            block["signature"] = event["delta"]["signature"]
        else:
            kind = event["delta"]["type"].removesuffix("_delta")
            assert block["type"] == kind
            block[kind] += event["delta"][kind]
    assert not opened
    return {**message, **delta["delta"], "usage": delta["usage"]}


def test_a_whole_message() -> None:
    """A message has exactly the fields of Anthropic's API, with cached tokens counted apart from
    the input, and the options reach the engine.
    """
    bench = Bench(play("Hel", "lo", cached=5, source="ram"))
    message = bench.message(max_tokens=9, stop_sequences=["x"])
    assert message.pop("id").startswith("chatcmpl-")
    assert message == {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "Hello"}],
        "model": "toy-1",
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 5,
            "input_tokens": 16,
            "output_tokens": 3,
        },
    }
    assert bench.worker.requests[0].max_tokens == 9
    assert bench.worker.requests[0].stop == ("x",)


def test_a_stream_opens_with_what_was_cached() -> None:
    start, block, *_ = Bench(play("Hel", "lo", cached=5, source="ram")).message_stream()
    assert start["message"]["usage"]["cache_read_input_tokens"] == 5
    assert start["message"]["usage"]["output_tokens"] == 0
    assert start["message"]["content"] == []
    assert block == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }


@pytest.mark.parametrize(
    "script",
    [
        play("Hel", "lo", cached=5),
        play("<think>", "hm", "so", "</think>", "Yes"),
        play(),
        play("<think>", "endless", stop="limit"),
        play("one", stop="word", word="STOP"),
    ],
)
def test_a_stream_makes_the_same_message(script: Callable[[Request], Script]) -> None:
    whole = Bench(script).message()
    streamed = built(Bench(script).message_stream())
    assert {**streamed, "id": ""} == {**whole, "id": ""}


def test_blocks_come_in_the_order_of_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    split_by_lines(monkeypatch)
    script = play(*CALLS)
    expected = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "I look"},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
        {"type": "tool_use", "id": "t2", "name": "wait", "input": {}},
    ]
    whole = Bench(script).message()
    streamed = built(Bench(script).message_stream())
    assert whole["content"] == streamed["content"] == expected
    assert whole["stop_reason"] == streamed["stop_reason"] == "tool_use"


def test_text_behind_a_call_is_a_block_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    split_by_lines(monkeypatch)
    message = built(Bench(play("c:a\n", "k:0:t:x\n", "c:b\n", "r:c\n", "r:d\n")).message_stream())
    assert [block["type"] for block in message["content"]] == [
        "text",
        "tool_use",
        "text",
        "thinking",
    ]


@pytest.mark.parametrize("arguments", ["{", "[1]", ""])
def test_arguments_that_are_no_object_make_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    split_by_lines(monkeypatch)
    message = Bench(play("k:0:t:x\n", f"a:0:{arguments}\n")).message()
    assert message["content"] == [{"type": "tool_use", "id": "t", "name": "x", "input": {}}]


def test_stop_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    split_by_lines(monkeypatch)

    def reason(*parts: str, **how: Any) -> tuple[str, str | None]:
        message = Bench(play(*parts, **how)).message()
        return message["stop_reason"], message["stop_sequence"]

    assert reason("c:a\n") == ("end_turn", None)
    assert reason("c:a\n", stop="limit") == ("max_tokens", None)
    assert reason("c:a\n", stop="word", word="END") == ("stop_sequence", "END")
    assert reason("k:0:t:x\n") == ("tool_use", None)
    assert reason("k:0:t:x\n", stop="limit") == ("max_tokens", None)


def test_a_block_that_the_prompt_has_opened_is_thinking() -> None:
    message = Bench(play("hm", "</think>", "\n\nYes"), template=THINKING).message()
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    message = Bench(play("Yes"), template=THINKING).message(thinking={"type": "disabled"})
    assert message["content"] == [{"type": "text", "text": "Yes"}]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("body", "said"), [({}, "'messages' is required"), ({"messages": [7]}, "must be an object")]
)
def test_errors_have_anthropics_form(path: str, body: Any, said: str) -> None:
    response = Bench(play("x")).post(path, body)
    assert response.status_code == 400
    answer = response.json()
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["code"] == 400
    assert said in answer["error"]["message"]


def test_a_prompt_that_is_too_long_is_refused() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 5000}], "stream": True}
    response = Bench(play("x")).post("/v1/messages", body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(
        f"prompt is too long: {error['n_prompt_tokens']} tokens > 4096 maximum; request"
    )


def test_a_failure_after_the_first_byte_is_an_event() -> None:
    events = Bench(fail(EngineError("broken"), "a")).message_stream()
    assert events[0]["type"] == "message_start"
    error = {"code": 500, "message": "broken", "type": "api_error"}
    assert events[-1] == {"type": "error", "error": error}


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "m"}]
)
def test_tokens_of_a_thread_are_not_counted(thread: Any) -> None:
    bench = Bench(play("x"))
    response = bench.post("/v1/messages/count_tokens", {"messages": HI, "thread": thread})
    assert response.status_code == 400
    assert response.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_the_written_tokens_are_apart_from_the_others() -> None:
    def script(request: Request) -> Script:
        stats = RequestStats(21, n_cached=5, n_evaluated=16)
        stats.count_saved("15-ab", 15)
        yield Done("limit", "", Timings(5, 16, 2.0, 0, 0.0, 2.0), stats, seq=0)

    usage = Bench(script).message()["usage"]
    assert usage == {
        "cache_creation_input_tokens": 10,
        "cache_read_input_tokens": 5,
        "input_tokens": 6,
        "output_tokens": 0,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_of_no_tokens_fills_the_cache(stream: bool) -> None:
    """Its reply is empty, and the message that it prepared evaluates nothing."""
    bench = Bench()
    body = {"messages": HI, "max_tokens": 0}
    message = built(bench.message_stream(**body)) if stream else bench.message(**body)
    assert message["content"] == []
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["output_tokens"] == 0
    assert message["usage"]["cache_read_input_tokens"] == 0
    usage = bench.message(max_tokens=1)["usage"]
    assert usage["input_tokens"] == 0
    assert usage["cache_read_input_tokens"] == sum(message["usage"].values())


def test_marks_reach_the_cache() -> None:
    bench = Bench(play("x"))
    mark = {"type": "ephemeral", "ttl": "1h"}
    bench.message(system=[{"type": "text", "text": "Be kind.", "cache_control": mark}])
    assert bench.worker.requests[0].retention == Retention(head_seconds=3600)
    bench.message(cache_control={"type": "ephemeral", "evict_on_complete": True})
    assert bench.worker.requests[1].retention == Retention(evict_on_complete=True)
