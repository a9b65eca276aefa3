from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.request import Done
from pyctl.engine.request import Request as EngineRequest
from pyctl.errors import (
    AuthenticationError,
    BusyError,
    ContextSizeError,
    EngineError,
    ForbiddenError,
    NotFoundError,
    NotSupportedError,
    RequestError,
    StateError,
    TooLargeError,
    UnavailableError,
)
from pyctl.prompt import Prompt
from pyctl.requests.text_limit import CHARS_PER_TOKEN
from pyctl.server.http import error_body, error_form, error_response
from tests.case import Case, check_error
from tests.client import CHAT, HI
from tests.unit.server.fake import N_CTX, Bench, fail, play
from tests.waiting import until

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (RequestError("x"), 400, "invalid_request_error"),
        (ContextSizeError(9, 8), 400, "exceed_context_size_error"),
        (AuthenticationError("x"), 401, "authentication_error"),
        (NotFoundError("x"), 404, "not_found_error"),
        (UnavailableError("x"), 503, "unavailable_error"),
        (EngineError("x"), 500, "server_error"),
        (StateError("x"), 500, "server_error"),
    ],
)
def test_every_kind(error: Exception, code: int, kind: str) -> None:
    body = error_body(error)["error"]
    assert body["code"] == code
    assert body["type"] == kind
    assert body["message"] == str(error)


def test_errors_of_the_program_keep_their_text_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(fail(ZeroDivisionError("secret")))
    with caplog.at_level(logging.ERROR, logger="pyctl.server"):
        response = bench.post("/v1/chat/completions", {"messages": HI})
    check_error(response, 500, "internal error")
    assert "secret" not in response.text
    assert "secret" in caplog.text


def test_an_error_of_a_request_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pyctl.server"):
        Bench(fail(UnavailableError("the server is shutting down"))).post(
            "/v1/chat/completions", {"messages": HI}
        )
    said = [record.getMessage() for record in caplog.records if record.name == "pyctl.server"]
    assert said == ["chat: the server is shutting down"]


@pytest.mark.parametrize(
    "case",
    [
        Case(CHAT, {}, 400, "messages"),
        Case(CHAT, {"messages": []}, 400, "messages"),
        Case(CHAT, {"messages": "hi"}, 400, "messages"),
        Case(CHAT, {"messages": [{"role": "<|wizard|>", "content": "x"}]}, 400, "wizard"),
        Case(
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "image input is not supported",
        ),
        Case(CHAT, {"messages": [{"role": "user", "content": 3}]}, 400, "content"),
        Case(CHAT, {"messages": HI, "stream": "yes"}, 400, "'stream'"),
        Case(CHAT, {"messages": HI, "temperature": "hot"}, 400, "'temperature'"),
        Case(CHAT, {"messages": HI, "temperature": True}, 400, "'temperature'"),
        Case(CHAT, {"messages": HI, "max_tokens": "many"}, 400, "'max_tokens'"),
        Case(CHAT, {"messages": HI, "max_tokens": -2}, 400, "'max_tokens'"),
        Case(CHAT, {"messages": HI, "n_predict": -2}, 400, "'n_predict'"),
        Case(CHAT, {"messages": HI, "top_k": []}, 400, "'top_k'"),
        Case(CHAT, {"messages": HI, "seed": "x"}, 400, "'seed'"),
        Case(CHAT, {"messages": HI, "stop": [1]}, 400, "'stop'"),
        Case(CHAT, {"messages": HI, "stop": {}}, 400, "'stop'"),
        Case(CHAT, {"messages": HI, "id_slot": "x"}, 400, "'id_slot'"),
        Case(CHAT, {"messages": HI, "id_slot": "9" * 5000}, 400, "'id_slot'"),
        Case(CHAT, {"messages": HI, "logprobs": 101}, 400, "'logprobs'"),
        Case(CHAT, {"messages": HI, "response_format": "json_object"}, 400, "'response_format'"),
        Case(CHAT, {"messages": HI, "samplers": [3]}, 400, "'samplers'"),
        Case(CHAT, {"messages": HI, "adaptive_decay": 1}, 400, "'adaptive_decay'"),
        Case(CHAT, {"messages": HI, "lora": [1]}, 400, "'lora'"),
        Case(CHAT, {"messages": HI, "lora": {}}, 400, "'lora'"),
        Case(
            CHAT, {"messages": HI, "reasoning_budget_tokens": -2}, 400, "'reasoning_budget_tokens'"
        ),
        Case(CHAT, {"messages": HI, "grammar": 3}, 400, "'grammar'"),
        Case(
            CHAT,
            {"messages": HI, "grammar": "x", "json_schema": {}},
            400,
            "both json_schema and grammar",
        ),
        Case(CHAT, {"messages": HI, "grammar": "x", "tools": [TOOL]}, 400, "with tools"),
        Case(CHAT, {"messages": HI, "json_schema": 3}, 400, "JSON schema"),
        Case(CHAT, {"messages": HI, "response_format": []}, 400, "'response_format'"),
        Case(
            CHAT,
            {"messages": HI, "response_format": {"type": "json_object", "schema": {"type": "x"}}},
            400,
            "JSON schema",
        ),
        Case(
            CHAT,
            {"messages": HI, "response_format": {"type": "json_schema", "json_schema": 3}},
            400,
            "'json_schema'",
        ),
        Case(
            CHAT,
            {
                "messages": HI,
                "response_format": {"type": "json_schema", "json_schema": {"enum": [1]}},
            },
            400,
            "'schema'",
        ),
        Case(CHAT, {"messages": HI, "think": "high"}, 400, "'think' must be true or false"),
        Case(
            CHAT,
            {"messages": HI, "thinking": {"budget_tokens": "many"}},
            400,
            "'thinking.budget_tokens'",
        ),
        Case(CHAT, {"messages": HI, "dry_sequence_breakers": []}, 400, "'dry_sequence_breakers'"),
        Case(CHAT, {"messages": HI, "repeat_penalty": 0}, 400, "repeat_penalty"),
        Case(CHAT, {"messages": HI, "stream_options": []}, 400, "'stream_options'"),
        Case(CHAT, {"messages": HI, "top_logprobs": 3}, 400, "top_logprobs requires logprobs"),
        Case(CHAT, {"messages": HI, "n": 0}, 400, "'n'"),
        Case(CHAT, {"messages": HI, "n": 129}, 400, "'n'"),
        Case(CHAT, {"messages": HI, "tools": {}}, 400, "'tools'"),
        Case(CHAT, {"messages": HI, "tools": [{"type": "function"}]}, 400, "tools[0]"),
        Case(CHAT, {"messages": HI, "tools": [{"type": "web_search"}]}, 400, "tools[0]"),
        Case(
            CHAT,
            {
                "messages": HI,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": []}}],
            },
            400,
            "parameters",
        ),
        Case(
            CHAT,
            {
                "messages": HI,
                "tools": [{"type": "function", "function": {"name": "f", "description": 3}}],
            },
            400,
            "description",
        ),
        Case(CHAT, {"messages": HI, "tools": [CALL], "tool_choice": "maybe"}, 400, "'tool_choice'"),
        Case(CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": 3}, 400, "tool_choice"),
        Case(
            CHAT,
            {"messages": HI, "tools": [TOOL], "tool_choice": {"type": "function"}},
            400,
            "tool_choice",
        ),
        Case(
            CHAT,
            {
                "messages": HI,
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            400,
            "'g'",
        ),
        Case(
            CHAT,
            {"messages": HI, "tools": [TOOL], "parallel_tool_calls": 1},
            400,
            "parallel_tool_calls",
        ),
        Case(
            CHAT,
            {"messages": HI, "prefix_cache": {"scope": "core"}},
            400,
            "prefix_cache.scope must be off",
        ),
        Case(CHAT, {"messages": HI, "reasoning_format": "loud"}, 400, "'reasoning_format'"),
        Case(
            CHAT,
            {"messages": HI, "chat_template_kwargs": {"enable_thinking": "no"}},
            400,
            "enable_thinking",
        ),
        Case(CHAT, {"messages": HI, "chat_template_kwargs": 1}, 400, "'chat_template_kwargs'"),
        Case(CHAT, {"messages": HI, "response_format": {"type": "sound"}}, 400, "sound"),
        Case(CHAT, {"messages": HI, "continue_final_message": True}, 400, "assistant"),
        Case(
            CHAT,
            {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
            400,
            "exclude",
        ),
        Case(
            CHAT,
            {"messages": [*HI, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
            400,
            "tool calls",
        ),
    ],
    ids=str,
)
def test_bad_chat_requests(case: Case) -> None:
    bench = Bench(play("x"))
    case.check(bench.client)
    assert not bench.worker.requests


NULL_CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": None}}


@pytest.mark.parametrize(
    ("path", "fields", "asked"),
    [
        (
            "chat/completions",
            {"messages": [*HI, {"role": "assistant", "tool_calls": [NULL_CALL]}, *HI]},
            {},
        ),
        ("chat/completions", {"messages": HI, "stop": [None, "x"]}, {"stop": ("x",)}),
        ("chat/completions", {"messages": HI, "id_slot": "0"}, {"seq": 0}),
        ("messages", {"messages": [{"role": "user", "content": []}], "max_tokens": 2}, {}),
        ("responses", {"input": [*HI, {"role": "assistant", "content": None}, *HI]}, {}),
    ],
)
def test_what_llama_server_takes_is_taken(
    path: str, fields: dict[str, Any], asked: dict[str, Any]
) -> None:
    bench = Bench(play("x"))
    answer = bench.post(f"/v1/{path}", fields)
    assert answer.status_code == 200, answer.text
    assert {name: getattr(bench.worker.requests[0], name) for name in asked} == asked


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"{",
            b'{"messages": [}',
            b"[1]",
            b'"x"',
            b"\xff",
            b'{"a": "\xff"}',
            b"{'a': 1}",
            b"[" * 100_000,
        ),
        b'{"a": 1e999}',
    ],
)
def test_what_is_no_json_object(body: bytes) -> None:
    bench = Bench(play("x"))
    for path in (
        "/v1/chat/completions",
        "/completion",
        "/v1/completions",
        "/tokenize",
        "/apply-template",
    ):
        Case(path, body, 400, "JSON").check(bench.client)


@pytest.mark.parametrize(
    "case",
    [
        Case("/completion", {"prompt": None}, 400, "missing"),
        Case("/v1/completions", {"prompt": None}, 400, "missing"),
        Case("/completion", {"prompt": []}, 400, "empty"),
        Case("/v1/completions", {"prompt": []}, 400, "empty"),
        Case("/completion", {"prompt": 3}, 400, "'prompt'"),
        Case("/v1/completions", {"prompt": 3}, 400, "'prompt'"),
        Case("/completion", {"prompt": True}, 400, "'prompt'"),
        Case("/v1/completions", {"prompt": True}, 400, "'prompt'"),
        Case("/completion", {"prompt": [True]}, 400, "'prompt'"),
        Case("/v1/completions", {"prompt": [True]}, 400, "'prompt'"),
        Case("/completion", {"prompt": [1.5, 2]}, 400, "'prompt'"),
        Case("/v1/completions", {"prompt": [1.5, 2]}, 400, "'prompt'"),
        Case("/completion", {"prompt": [-1]}, 400, "token ids"),
        Case("/v1/completions", {"prompt": [-1]}, 400, "token ids"),
        Case("/completion", {"prompt": [10**12]}, 400, "token ids"),
        Case("/v1/completions", {"prompt": [10**12]}, 400, "token ids"),
        Case("/completion", {"prompt": [[10**6]]}, 400, "token ids"),
        Case("/v1/completions", {"prompt": [[10**6]]}, 400, "token ids"),
        Case("/completion", {"prompt": {"text": "x"}}, 400, "'prompt'"),
        Case("/v1/completions", {"prompt": {"text": "x"}}, 400, "'prompt'"),
    ],
    ids=str,
)
def test_bad_prompts(case: Case) -> None:
    case.check(Bench(play("x")).client)


def test_unknown_fields_and_nulls_are_ignored() -> None:
    bench = Bench(play("x"))
    bench.chat(
        no_such_field={"a": 1},
        temperature=None,
        stop=None,
        tools=None,
        response_format={"type": "text"},
    )
    assert bench.worker.requests[0].sampling.temperature == 0.8


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_a_real_400(stream: bool) -> None:
    bench = Bench(play("x"))
    messages = [{"role": "user", "content": "x" * N_CTX}]
    response = bench.post("/v1/chat/completions", {"messages": messages, "stream": stream})
    check_error(response, 400, str(N_CTX), kind="exceed_context_size_error")
    error = response.json()["error"]
    assert error["n_ctx"] == N_CTX
    assert error["n_prompt_tokens"] > N_CTX


def test_of_several_prompts_none_is_left_running_when_one_is_refused() -> None:
    bench = Bench(play("x"))
    refused = bench.post("/completion", {"prompt": ["a", "x" * N_CTX]})
    check_error(refused, 400, kind="exceed_context_size_error")
    assert [handle.cancelled for handle in bench.worker.handles] == [True]


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_of_a_text_that_is_much_too_long_only_the_beginning_is_tokenised(path: str) -> None:
    bench = Bench(play("x"))
    text = "x" * (1000 * N_CTX)
    body = (
        {"prompt": text}
        if path == "/completion"
        else {"messages": [{"role": "user", "content": text}]}
    )
    response = bench.post(path, body)
    check_error(response, 400, str(N_CTX), kind="exceed_context_size_error")
    assert N_CTX < response.json()["error"]["n_prompt_tokens"] <= CHARS_PER_TOKEN * N_CTX


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_failure_before_the_first_byte_is_a_response(path: str, stream: bool) -> None:
    bench = Bench(fail(UnavailableError("closing")))
    response = bench.post(path, {"messages": HI, "input": HI, "stream": stream})
    if path != "/v1/messages":
        check_error(response, 503, "closing")
        return
    body = response.json()
    assert response.status_code == 503
    assert body["type"] == "error"
    assert body["error"]["message"] == "closing"


def test_a_failure_after_the_first_byte_is_the_last_event() -> None:
    bench = Bench(fail(EngineError("out of memory"), "a"))
    *chunks, last = bench.chat_stream()
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == [None, "a"]
    assert last == {"error": {"code": 500, "message": "out of memory", "type": "server_error"}}
    *chunks, last = bench.stream("/completion", {"prompt": "x"})
    assert [chunk["content"] for chunk in chunks] == ["a"]
    assert last["error"]["type"] == "server_error"


def test_the_server_goes_on_after_errors() -> None:
    bench = Bench(fail(EngineError("once")))
    Case(CHAT, {"messages": HI}, 500, "once").check(bench.client)
    bench.engine.script = play("fine")
    assert bench.chat()["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (ContextSizeError(9, 8), 400, "invalid_request_error"),
        (NotSupportedError("x"), 501, "invalid_request_error"),
        (AuthenticationError("x"), 401, "authentication_error"),
        (ForbiddenError("x"), 403, "permission_error"),
        (NotFoundError("x"), 404, "not_found_error"),
        (TooLargeError("x"), 413, "request_too_large"),
        (BusyError(3), 503, "overloaded_error"),
        (EngineError("x"), 500, "api_error"),
        (ValueError("x"), 500, "api_error"),
    ],
)
def test_every_kind_as_anthropic_calls_it(error: Exception, code: int, kind: str) -> None:
    response = error_response(error, error_form("/v1/messages"))
    body = json.loads(bytes(response.body))
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert response.status_code == code
    assert ("retry-after" in response.headers) == isinstance(error, BusyError)


@contextmanager
def busy(n_queue: int) -> Iterator[Bench]:
    """Yield a server whose engine takes no step, and so many requests that wait."""
    bench = Bench()
    gate = threading.Event()
    begun = threading.Event()
    bench.engine.settings = EngineSettings(n_queue=n_queue)
    bench.worker.call(lambda: (begun.set(), gate.wait(60)))
    assert begun.wait(60)
    try:
        yield bench
    finally:
        gate.set()
    # Asked on the engine's thread: between the inbox and the engine a request is in neither.
    until(
        lambda: (
            not bench.worker.call(lambda: bench.engine.n_waiting or bench.engine.running).result()
        )
    )


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_503_and_says_when_to_try_again(path: str, stream: bool) -> None:
    body = {"prompt": "a", "messages": HI, "max_tokens": 1, "stream": stream}
    with busy(n_queue=2) as bench:
        # One for the sequence that is free, two that wait.
        handles = [
            bench.worker.submit(EngineRequest(Prompt.from_ids([1]), max_tokens=1)) for _ in range(3)
        ]
        response = bench.post(path, body)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert "3 requests are waiting" in response.json()["error"]["message"]
    if path != "/v1/messages":
        assert response.json()["error"]["type"] == "unavailable_error"
    for handle in handles:
        assert any(isinstance(event, Done) for event in handle)
    assert bench.post(path, {**body, "stream": False}).status_code == 200


def test_each_choice_counts_in_the_queue() -> None:
    with busy(n_queue=3) as bench:
        refused = bench.post("/completion", {"prompt": "a", "n_predict": 1, "n": 5})
    assert refused.status_code == 503
    assert bench.post("/completion", {"prompt": "a", "n_predict": 1, "n": 4}).status_code == 200
