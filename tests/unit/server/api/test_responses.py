from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from pyctl.engine.request import Request
from pyctl.errors import EngineError
from pyctl.server.api import responses, responses_request
from tests.client import HI
from tests.unit.server.fake import Bench, Script, fail, play
from tests.unit.server.parts import CALLS, split_by_lines

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def prompt_of(bench: Bench) -> str:
    return bench.tokenizer.detokenize(bench.worker.requests[-1].prompt.tokens.tolist()).decode()


def anonymous(value: Any) -> Any:
    """Return ``value`` without the parts that no two replies share."""
    if isinstance(value, dict):
        hidden = ("id", "created_at", "completed_at", "timings")
        return {name: anonymous(member) for name, member in value.items() if name not in hidden}
    return [anonymous(item) for item in value] if isinstance(value, list) else value


def test_a_whole_response() -> None:
    """A response has the fields of OpenAI's Responses API, with its options echoed."""
    body = Bench(play("Hel", "lo", cached=5)).response(
        max_output_tokens=9, temperature=0.5, metadata={"a": "b"}
    )
    assert body["id"].startswith("resp_")
    assert body["object"] == "response"
    assert body["status"] == "completed"
    assert body["model"] == "toy-1"
    (message,) = body["output"]
    assert message.pop("id").startswith("msg_")
    content = [{"type": "output_text", "annotations": [], "logprobs": [], "text": "Hello"}]
    assert message == {
        "content": content,
        "role": "assistant",
        "status": "completed",
        "type": "message",
    }
    assert body["usage"] == {
        "input_tokens": 21,
        "output_tokens": 3,
        "total_tokens": 24,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["temperature"] == 0.5
    assert body["max_output_tokens"] == 9
    assert body["metadata"] == {"a": "b"}


def test_a_stream_has_all_events_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item of a stream is opened, filled and closed before the next, with consistent ids and
    indices, and the final response contains the same items.
    """
    split_by_lines(monkeypatch)
    events = Bench(play(*CALLS, "a:1:{}\n")).response_stream()
    assert [event["type"].removeprefix("response.") for event in events] == [
        *(
            "created",
            "in_progress",
            "output_item.added",
            "reasoning_text.delta",
            "reasoning_text.done",
        ),
        *(
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
        ),
        *("output_text.done", "content_part.done", "output_item.done", "output_item.added"),
        *(
            "function_call_arguments.delta",
            "function_call_arguments.delta",
            "function_call_arguments.done",
        ),
        *("output_item.done", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    final = events[-1]["response"]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert final["output"] == items
    assert [item["type"] for item in items] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert items[2] == {
        "id": "fc_t1",
        "type": "function_call",
        "status": "completed",
        "arguments": '{"at":1}',
        "call_id": "call_t1",
        "name": "look",
    }
    place = -1
    for event in events:
        if event["type"] == "response.output_item.added":
            place += 1
            assert event["item"]["id"] == items[place]["id"]
        if "output_index" in event:
            assert event["output_index"] == place
        if "item_id" in event:
            assert event["item_id"] == items[place]["id"]


def test_a_call_of_a_custom_tool_has_its_input_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model writes the input of a custom tool as JSON, and the client gets it as text,
    streamed, and whole when it comes back in the next request.
    """
    split_by_lines(monkeypatch)
    pieces = ('{"inp', 'ut": "*** Be', "gin\\", "n\\ud83d", '\\ude00"}')
    calls = (
        "k:0:t1:patch\n",
        *(f"a:0:{piece}\n" for piece in pieces),
        "k:1:t2:agents__run\n",
        'a:1:{"input":""}\n',
    )
    space = {
        "type": "namespace",
        "name": "agents",
        "description": "",
        "tools": [{"type": "custom", "name": "run"}],
    }
    bench = Bench(play(*calls))
    tools = [{"type": "custom", "name": "patch"}, space]
    *raw, completed = bench.response_stream(tools=tools)
    events = [EVENT.validate_python(event) for event in raw[2:]]
    kinds = [event.type.removeprefix("response.") for event in events]
    delta = "custom_tool_call_input.delta"
    done = "custom_tool_call_input.done"
    assert kinds == ["output_item.added", delta, done, "output_item.done"] * 2
    text = "*** Begin\n\U0001f600"
    assert "".join(event.delta for event in events if event.type == f"response.{delta}") == text
    assert [event.input for event in events if event.type == f"response.{done}"] == [text, ""]
    first, second = output = completed["response"]["output"]
    shared = {"type": "custom_tool_call", "status": "completed"}
    assert first == {**shared, "id": "ctc_t1", "call_id": "call_t1", "name": "patch", "input": text}
    assert second == {
        **shared,
        "id": "ctc_t2",
        "call_id": "call_t2",
        "name": "run",
        "input": "",
        "namespace": "agents",
    }
    assert bench.response(tools=tools)["output"] == output
    result = {"type": "custom_tool_call_output", "call_id": "call_t1", "output": "done"}
    bench.response([*HI, first, result], tools=tools)
    assert "*** Begin" in prompt_of(bench)


@pytest.mark.parametrize(
    "script",
    [
        play("Hel", "lo", cached=5),
        play("<think>", "hm", "</think>", "Yes"),
        play(),
        play("<think>", "endless", stop="limit"),
    ],
)
def test_a_stream_ends_with_the_same_response(script: Callable[[Request], Script]) -> None:
    events = Bench(script).response_stream()
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["timings"]["prompt_n"] > 0
    assert anonymous(events[-1]["response"]) == anonymous(Bench(script).response())


def test_a_reply_that_was_cut_off_says_so() -> None:
    body = Bench(play("and", stop="limit")).response()
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    "pieces",
    [
        ("c:look\n", "k:0:t1:look\n", 'a:0:{"at":\n'),
        ("c:look\n", "k:0:t1:patch\n", 'a:0:{"input": "ab\n'),
        ("c:look\n",),
        ("r:look\n",),
    ],
)
def test_an_item_that_was_cut_off_is_incomplete(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[str, ...]
) -> None:
    """At the limit of tokens the last item is `incomplete`, the earlier ones are `completed`, and
    no event announces the whole arguments of a call.
    """
    split_by_lines(monkeypatch)
    tools = [{"type": "function", "name": "look"}, {"type": "custom", "name": "patch"}]
    bench = Bench(play(*pieces, stop="limit"))
    *events, final = bench.response_stream(tools=tools)
    output = final["response"]["output"]
    assert [item["status"] for item in output] == ["completed"] * (len(output) - 1) + ["incomplete"]
    ended = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert ended == output
    kinds = {event["type"] for event in events}
    assert not kinds & {
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.done",
    }
    assert [item["status"] for item in bench.response(tools=tools)["output"]] == [
        item["status"] for item in output
    ]


def test_a_call_that_was_whole_before_the_reply_was_cut_off_is_completed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split_by_lines(monkeypatch)
    tools = [{"type": "function", "name": "look"}, {"type": "custom", "name": "patch"}]
    for name, arguments, kind in (
        ("look", '{"at":1}', "function_call_arguments"),
        ("patch", '{"input":"a"}', "custom_tool_call_input"),
    ):
        *events, final = Bench(
            play(f"k:0:t1:{name}\n", f"a:0:{arguments}\n", stop="limit")
        ).response_stream(tools=tools)
        assert final["response"]["status"] == "incomplete"
        assert final["response"]["output"][0]["status"] == "completed"
        assert f"response.{kind}.done" in [event["type"] for event in events]


def test_an_item_is_incomplete_when_the_reply_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    split_by_lines(monkeypatch)
    *_, done, failed, error = Bench(fail(EngineError("oh"), "c:look\n")).response_stream()
    assert done["type"] == "response.output_item.done"
    assert failed["type"] == "response.failed"
    assert error["type"] == "error"
    assert [done["item"]] == failed["response"]["output"]
    assert done["item"]["status"] == "incomplete"
    assert done["item"]["content"][0]["text"] == "look"


@pytest.mark.parametrize(
    ("fields", "n_top"),
    [
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 1}, 1),
        ({"top_logprobs": 1}, 1),
    ],
)
def test_log_probabilities_belong_to_the_text_of_a_message(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], n_top: int
) -> None:
    """Probabilities are those of the content, not of the reasoning, and equal in deltas, in the
    final event and in a whole reply.
    """
    split_by_lines(monkeypatch)
    bench = Bench(play("r:hm\n", "c:a\n", "c:b\n", probs=[-0.5, -1.0]))
    *events, final = bench.response_stream(**fields)
    part = final["response"]["output"][1]["content"][0]
    assert [(each["logprob"], len(each["top_logprobs"])) for each in part["logprobs"]] == [
        (-0.5, n_top)
    ] * 2
    deltas = [
        event["logprobs"] for event in events if event["type"] == "response.output_text.delta"
    ]
    assert [len(found) for found in deltas] == [1, 1]
    assert [*deltas[0], *deltas[1]] == part["logprobs"]
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == part["logprobs"]
    body = bench.response(**fields)
    assert body["output"][1]["content"][0]["logprobs"] == part["logprobs"]
    assert body["top_logprobs"] == n_top
    assert bench.response()["output"][1]["content"][0]["logprobs"] == []


def test_reasoning_is_an_item_and_counted() -> None:
    body = Bench(play("<think>", "h", "m", "</think>", "Yes")).response()
    assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert body["output"][0]["encrypted_content"] == ""
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_reasoning_comes_back_from_clients_that_store_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The encrypted content of a reasoning item brings the reasoning back into the conversation,
    although the server keeps no response.
    """
    split_by_lines(monkeypatch)
    bench = Bench(play("r:hm\n", "c:yes\n"))
    item = bench.response(include=["reasoning.encrypted_content"], store=False)["output"][0]
    sent = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
    asked: list[Any] = []
    prepare = responses.prepare
    monkeypatch.setattr(
        responses,
        "prepare",
        lambda service, body, fetched: asked.append(body) or prepare(service, body),
    )
    bench.response([*HI, sent, {"role": "assistant", "content": "yes"}, *HI])
    assert asked[0].conversation.messages[1] == {
        "role": "assistant",
        "reasoning_content": "hm",
        "content": "yes",
    }


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
def test_what_sealed_items_unpack_to_is_counted_for_all_of_them(path: str) -> None:
    sealed = responses_request.seal("x" * (3 << 20))
    assert len(sealed) < 5000
    items = [{"type": "reasoning", "summary": [], "encrypted_content": sealed}] * 12
    bench = Bench(play("x"))
    tracemalloc.start()
    answer = bench.post(path, {"input": items})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answer.status_code == 400
    assert "the reasoning in 'input' has more than" in answer.json()["error"]["message"]
    assert peak < 128 << 20


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_is_continued_by_its_items(
    monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """Items of a response, sent back with the result of their call, render each text and each
    result once.
    """
    split_by_lines(monkeypatch)
    bench = Bench(play("c:I look\n", "k:0:t1:look\n", "a:0:{}\n"))
    asked = {"instructions": "Be kind."}
    first = bench.response_stream(**asked)[-1]["response"] if streamed else bench.response(**asked)
    output = {
        "type": "function_call_output",
        "call_id": first["output"][-1]["call_id"],
        "output": "sunny",
    }
    items = [{"role": "user", "content": "Hi"}, *first["output"], output]
    second = bench.response(items, **asked)
    prompts = [prompt_of(bench)]
    bench.response([*items, *second["output"], {**output, "output": "rainy"}], **asked)
    prompts.append(prompt_of(bench))
    assert prompts[0].startswith(
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )
    assert [(prompt.count("I look"), prompt.count("sunny")) for prompt in prompts] == [
        (1, 1),
        (2, 1),
    ]


@pytest.mark.parametrize("name", ["previous_response_id", "conversation"])
def test_nothing_is_stored_and_who_counts_on_it_is_told_so(name: str) -> None:
    bench = Bench(play("x"))
    first = bench.response(store=True, **{name: None})
    assert first["store"] is False
    assert first["previous_response_id"] is None
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        for value in (first["id"], {"id": "conv_1"}) if name == "conversation" else (first["id"],):
            response = bench.post(path, {"input": "x", "stream": True, name: value})
            error = response.json()["error"]
            assert response.status_code == 400
            assert error["type"] == "invalid_request_error"
            assert re.search(
                f"does not support '{name}': .*send all earlier items in 'input'", error["message"]
            )
    for method in ("GET", "DELETE"):
        assert bench.client.request(method, f"/v1/responses/{first['id']}").status_code == 404
    assert bench.post("/v1/conversations", {}).status_code == 404


@pytest.mark.parametrize("path", ["/responses", "/v1/responses", "/v1/responses/input_tokens"])
def test_bad_requests_are_refused(path: str) -> None:
    response = Bench(play("x")).post(path, {"input": 7})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_progress_and_timings_for_those_who_want_them() -> None:
    events = Bench(play("a", "b", cached=5)).response_stream(
        return_progress=True, timings_per_token=True
    )
    progress = [event for event in events if "prompt_progress" in event]
    assert [event["type"] for event in progress] == ["response.in_progress"] * 2
    assert [event["prompt_progress"]["processed"] for event in progress] == [5, 21]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert all(event["timings"]["cache_n"] == 5 for event in deltas)


def test_a_failure_after_the_first_byte_is_two_events() -> None:
    *_, failed, error = Bench(fail(EngineError("broken"), "a")).response_stream()
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "broken"}
    assert error["type"] == "error"
    assert error["message"] == "broken"
    assert error["error"]["code"] == 500
