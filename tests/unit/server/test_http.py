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
from pyctl.server.http import error_body, error_response, form_of
from pyctl.server.server_settings import ServerSettings
from tests.unit.server.fake import HI, N_CTX, Bench, fail, play
from tests.waiting import until

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


def check(response: Any, status: int, kind: str, *words: str) -> None:
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert (error["code"], error["type"]) == (status, kind)
    for word in words:
        assert word in error["message"]
    assert response.headers["content-type"] == "application/json; charset=utf-8"


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
    assert (body["code"], body["type"], body["message"]) == (code, kind, str(error))


def test_errors_of_the_program_keep_their_text_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(fail(ZeroDivisionError("secret")))
    with caplog.at_level(logging.ERROR, logger="pyctl.server"):
        response = bench.post("/v1/chat/completions", {"messages": HI})
    check(response, 500, "server_error", "internal error")
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
    ("fields", "words"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "<|wizard|>", "content": "x"}]}, "wizard"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "image input is not supported",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": HI, "stream": "yes"}, "'stream'"),
        ({"messages": HI, "temperature": "hot"}, "'temperature'"),
        ({"messages": HI, "temperature": True}, "'temperature'"),
        ({"messages": HI, "max_tokens": "many"}, "'max_tokens'"),
        ({"messages": HI, "max_tokens": -2}, "'max_tokens'"),
        ({"messages": HI, "n_predict": -2}, "'n_predict'"),
        ({"messages": HI, "top_k": []}, "'top_k'"),
        ({"messages": HI, "seed": "x"}, "'seed'"),
        ({"messages": HI, "stop": [1]}, "'stop'"),
        ({"messages": HI, "stop": {}}, "'stop'"),
        ({"messages": HI, "id_slot": "x"}, "'id_slot'"),
        ({"messages": HI, "id_slot": "9" * 5000}, "'id_slot'"),
        ({"messages": HI, "logprobs": 101}, "'logprobs'"),
        ({"messages": HI, "response_format": "json_object"}, "'response_format'"),
        ({"messages": HI, "samplers": [3]}, "'samplers'"),
        ({"messages": HI, "adaptive_decay": 1}, "'adaptive_decay'"),
        ({"messages": HI, "lora": [1]}, "'lora'"),
        ({"messages": HI, "lora": {}}, "'lora'"),
        ({"messages": HI, "reasoning_budget_tokens": -2}, "'reasoning_budget_tokens'"),
        ({"messages": HI, "grammar": 3}, "'grammar'"),
        ({"messages": HI, "grammar": "x", "json_schema": {}}, "both json_schema and grammar"),
        ({"messages": HI, "grammar": "x", "tools": [TOOL]}, "with tools"),
        ({"messages": HI, "json_schema": 3}, "JSON schema"),
        ({"messages": HI, "response_format": []}, "'response_format'"),
        (
            {"messages": HI, "response_format": {"type": "json_object", "schema": {"type": "x"}}},
            "JSON schema",
        ),
        (
            {"messages": HI, "response_format": {"type": "json_schema", "json_schema": 3}},
            "'json_schema'",
        ),
        (
            {
                "messages": HI,
                "response_format": {"type": "json_schema", "json_schema": {"enum": [1]}},
            },
            "'schema'",
        ),
        ({"messages": HI, "think": "high"}, "'think' must be true or false"),
        ({"messages": HI, "thinking": {"budget_tokens": "many"}}, "'thinking.budget_tokens'"),
        ({"messages": HI, "dry_sequence_breakers": []}, "'dry_sequence_breakers'"),
        ({"messages": HI, "repeat_penalty": 0}, "repeat_penalty"),
        ({"messages": HI, "stream_options": []}, "'stream_options'"),
        ({"messages": HI, "top_logprobs": 3}, "top_logprobs requires logprobs"),
        ({"messages": HI, "n": 0}, "'n'"),
        ({"messages": HI, "n": 129}, "'n'"),
        ({"messages": HI, "tools": {}}, "'tools'"),
        ({"messages": HI, "tools": [{"type": "function"}]}, "tools[0]"),
        ({"messages": HI, "tools": [{"type": "web_search"}]}, "tools[0]"),
        (
            {
                "messages": HI,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": []}}],
            },
            "parameters",
        ),
        (
            {
                "messages": HI,
                "tools": [{"type": "function", "function": {"name": "f", "description": 3}}],
            },
            "description",
        ),
        ({"messages": HI, "tools": [CALL], "tool_choice": "maybe"}, "'tool_choice'"),
        ({"messages": HI, "tools": [TOOL], "tool_choice": 3}, "tool_choice"),
        ({"messages": HI, "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {
                "messages": HI,
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "'g'",
        ),
        ({"messages": HI, "tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": HI, "prefix_cache": {"scope": "core"}}, "prefix_cache.scope must be off"),
        ({"messages": HI, "reasoning_format": "loud"}, "'reasoning_format'"),
        ({"messages": HI, "chat_template_kwargs": {"enable_thinking": "no"}}, "enable_thinking"),
        ({"messages": HI, "chat_template_kwargs": 1}, "'chat_template_kwargs'"),
        ({"messages": HI, "response_format": {"type": "sound"}}, "sound"),
        ({"messages": HI, "continue_final_message": True}, "assistant"),
        (
            {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
            "exclude",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
            "tool calls",
        ),
    ],
)
def test_bad_chat_requests(fields: dict[str, Any], words: str) -> None:
    bench = Bench(play("x"))
    check(bench.post("/v1/chat/completions", fields), 400, "invalid_request_error", words)
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
        check(bench.client.post(path, content=body), 400, "invalid_request_error", "JSON")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "missing"),
        ([], "empty"),
        (3, "'prompt'"),
        (True, "'prompt'"),
        ([True], "'prompt'"),
        ([1.5, 2], "'prompt'"),
        ([-1], "token ids"),
        ([10**12], "token ids"),
        ([[10**6]], "token ids"),
        ({"text": "x"}, "'prompt'"),
    ],
)
def test_bad_prompts(prompt: Any, words: str) -> None:
    bench = Bench(play("x"))
    for path in ("/completion", "/v1/completions"):
        check(bench.post(path, {"prompt": prompt}), 400, "invalid_request_error", words)


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
    check(response, 400, "exceed_context_size_error", str(N_CTX))
    error = response.json()["error"]
    assert error["n_ctx"] == N_CTX
    assert error["n_prompt_tokens"] > N_CTX


def test_of_several_prompts_none_is_left_running_when_one_is_refused() -> None:
    bench = Bench(play("x"))
    check(
        bench.post("/completion", {"prompt": ["a", "x" * N_CTX]}), 400, "exceed_context_size_error"
    )
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
    check(response, 400, "exceed_context_size_error", str(N_CTX))
    assert N_CTX < response.json()["error"]["n_prompt_tokens"] <= CHARS_PER_TOKEN * N_CTX


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_failure_before_the_first_byte_is_a_response(path: str, stream: bool) -> None:
    bench = Bench(fail(UnavailableError("closing")))
    response = bench.post(path, {"messages": HI, "input": HI, "stream": stream})
    if path != "/v1/messages":
        return check(response, 503, "unavailable_error", "closing")
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["message"]) == (
        503,
        "error",
        "closing",
    )


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
    check(bench.post("/v1/chat/completions", {"messages": HI}), 500, "server_error", "once")
    bench.engine.script = play("fine")
    assert bench.chat()["choices"][0]["message"]["content"] == "fine"


def test_unknown_paths_and_wrong_methods() -> None:
    client = Bench(play("x")).client
    check(client.get("/nothing/here"), 404, "not_found_error", "no such endpoint: /nothing/here")
    check(client.post("/v1/files", json={}), 404, "not_found_error", "no such endpoint: /v1/files")
    check(
        client.get("/v1/chat/completions"),
        404,
        "not_found_error",
        "no such endpoint: GET /v1/chat/completions",
    )
    check(client.post("/health", json={}), 404, "not_found_error", "no such endpoint: POST /health")


@pytest.mark.parametrize("prefix", ["", "/api"])
def test_errors_before_an_endpoint_have_the_form_of_the_api(prefix: str) -> None:
    client = Bench(play("x"), settings=ServerSettings(api_keys=("k",), api_prefix=prefix)).client
    for key, status in (("wrong", 401), ("k", 404)):
        headers = {"authorization": f"Bearer {key}"}
        plain, anthropic, ollama = (
            client.request("PUT", f"{prefix}{path}", headers=headers)
            for path in ("/v1/files", "/v1/messages/batches", "/api/me")
        )
        assert [each.status_code for each in (plain, anthropic, ollama)] == [status] * 3
        assert list(plain.json()) == ["error"]
        assert anthropic.json()["type"] == "error"
        assert isinstance(ollama.json()["error"], str)


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
    response = error_response(error, form_of("/v1/messages"))
    body = json.loads(bytes(response.body))
    assert (body["type"], body["error"]["type"], response.status_code) == ("error", kind, code)
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
            bench.worker.submit(EngineRequest(Prompt.of([1]), max_tokens=1)) for _ in range(3)
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
