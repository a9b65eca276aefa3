from __future__ import annotations

import json
from typing import Any

import pytest

from pyctl.errors import EngineError
from pyctl.requests.reply_settings import ReplySettings
from tests.case import Case
from tests.client import HI
from tests.pictures import GridReader
from tests.unit.chat import toy
from tests.unit.server.api.test_images import URL, openai, prompt_of
from tests.unit.server.fake import Bench, fail, play
from tests.unit.server.parts import sent_in_silence

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}},
}
TOOLS = "{{ tools | tojson if tools }}" + toy.CHATML
FUNCTION: dict[str, Any] = {"name": "f", "arguments": {"a": 1}}
BASE64 = URL.partition(",")[2]


def lines(bench: Bench, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the chunks of a stream."""
    response = bench.post(path, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def tokens(bench: Bench, path: str, body: dict[str, Any]) -> list[int]:
    """Return the prompt of a request."""
    return list(prompt_of(bench, path, body).tokens.tolist())


def test_a_chat_streams_unless_it_says_no() -> None:
    """Ollama's chat streams by default, splits reasoning from content, and ends with its counts and
    durations in nanoseconds.
    """
    bench = Bench(play("\nhm", "\n</think>", "\n\nYes", ".", cached=16, source="ram"), toy.THINKING)
    whole = bench.post("/api/chat", {"model": "m", "messages": HI, "stream": False})
    assert whole.headers["x-pyctl-cache"].startswith("source=ram; cached=16")
    body = whole.json()
    assert body["message"] == {"role": "assistant", "content": "Yes.", "thinking": "hm\n"}
    *chunks, last = lines(bench, "/api/chat", {"model": "m", "messages": HI})
    assert "".join(chunk["message"].get("thinking", "") for chunk in chunks) == "hm\n"
    assert "".join(chunk["message"]["content"] for chunk in chunks) == "Yes."
    assert not any(chunk["done"] for chunk in chunks)
    assert last["message"] == {"role": "assistant", "content": ""}
    for end in (body, last):
        assert end["model"] == "toy-1"
        assert end["done"] is True
        assert end["done_reason"] == "stop"
        n_prompt = len(bench.worker.requests[-1].prompt)
        assert end["prompt_eval_count"] == n_prompt
        assert end["eval_count"] == 5
        assert end["prompt_eval_duration"] == 2_000_000
        assert end["eval_duration"] == 3_000_000
        assert end["total_duration"] == end["load_duration"] + 5_000_000
    assert (
        Bench(play("a", stop="limit"))
        .post("/api/generate", {"prompt": "a", "stream": False})
        .json()["done_reason"]
        == "length"
    )


def test_the_same_prompt_as_of_all_other_apis() -> None:
    """Chats, generation and raw prompts give the tokens of the same request through OpenAI's and
    the native API, so that all share one cache.
    """
    bench = Bench(play("x"), TOOLS)
    system = {"role": "system", "content": "s"}
    asked = {"role": "user", "content": "a"}
    called = {"role": "assistant", "content": "c", "tool_calls": [{"function": FUNCTION}]}
    result = {"role": "tool", "tool_name": "f", "content": "r"}
    theirs = {
        **called,
        "tool_calls": [
            {"id": "x", "type": "function", "function": {**FUNCTION, "arguments": '{"a":1}'}}
        ],
    }
    ours = tokens(
        bench, "/api/chat", {"messages": [system, asked, called, result], "tools": [TOOL]}
    )
    messages = [system, asked, theirs, {"role": "tool", "tool_call_id": "x", "content": "r"}]
    assert ours == tokens(bench, "/v1/chat/completions", {"messages": messages, "tools": [TOOL]})
    simple = tokens(bench, "/api/generate", {"system": "s", "prompt": "a"})
    assert simple == tokens(bench, "/v1/chat/completions", {"messages": [system, asked]})
    raw = tokens(bench, "/api/generate", {"prompt": "a b", "raw": True})
    assert raw == tokens(bench, "/completion", {"prompt": "a b"})


def test_images() -> None:
    bench = Bench(play("x"), images=GridReader())
    expected = tokens(bench, "/v1/chat/completions", {"messages": [openai(URL, "a")]})
    message = {"role": "user", "content": "a", "images": [BASE64]}
    assert tokens(bench, "/api/chat", {"messages": [message]}) == expected
    assert tokens(bench, "/api/generate", {"prompt": "a", "images": [BASE64]}) == expected
    bad = bench.post("/api/chat", {"messages": [*HI, {**message, "images": [BASE64, "!"]}]})
    assert bad.status_code == 400
    assert bad.json()["error"].partition(":")[0] == "messages[1].images[1]"
    blind = Bench(play("x")).post("/api/chat", {"messages": [message]})
    assert blind.status_code == 400
    assert "mmproj" in blind.json()["error"]


@pytest.mark.parametrize(
    "case",
    [
        Case("/api/chat", {"messages": HI, "think": "wizard"}, 400, "think"),
        Case("/api/chat", {"messages": HI, "format": "xml"}, 400, "format"),
        Case("/api/chat", {"messages": [7]}, 400, "messages[0] must be an object"),
        Case(
            "/api/chat",
            {"messages": [{"role": "assistant", "tool_calls": [7]}]},
            400,
            "messages[0].tool_calls[0]",
        ),
        Case("/api/chat", {"messages": HI, "options": {"temperature": "hot"}}, 400, "temperature"),
        Case(
            "/api/chat",
            {"messages": [{"role": "user", "content": "x" * 5000}]},
            400,
            "exceeds the available context size",
        ),
        Case("/api/chat", {"messages": HI, "logprobs": True}, 501, "logprobs"),
        Case("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 501, "template"),
        Case("/api/generate", {"prompt": "a", "context": [1, 2]}, 501, "context"),
        Case(
            "/api/generate",
            {"prompt": "a", "raw": True, "system": "s"},
            400,
            "raw mode does not support",
        ),
        Case(
            "/api/generate",
            {"prompt": "a", "suffix": "b"},
            501,
            "Infill is not supported by this model",
        ),
        Case("/api/generate", {"prompt": "a", "raw": True, "images": [BASE64]}, 400, "images"),
        Case("/api/embed", {"input": "a"}, 501, "--embeddings"),
        Case("/api/embed", {"input": 7}, 400, "input"),
        Case("/api/show", b"{", 400, "JSON"),
        Case("/api/pull", {"model": "m"}, 501, "pyctl serve"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_in_ollamas_form(case: Case) -> None:
    response = case.send(Bench(play("x")).client)
    assert response.status_code == case.status, response.text
    assert list(response.json()) == ["error"]
    assert case.error in response.json()["error"]


def test_what_open_webui_sends() -> None:
    """Version 0.12.4: ids of calls may be null, an image has no head, and the settings of a chat
    come as they are.
    """
    messages = [
        {"role": "user", "content": "a", "images": [BASE64]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"index": 0, "id": None, "function": {**FUNCTION}}],
        },
        {"role": "tool", "content": "r", "tool_call_id": None},
    ]
    body = {
        "model": "toy-1:latest",
        "messages": messages,
        "stream": True,
        "options": {"num_predict": 4},
    }
    body |= {"tools": [TOOL], "metadata": {}, "system": "s", "think": True, "keep_alive": -1}
    *_, last = lines(Bench(play("x"), TOOLS, images=GridReader()), "/api/chat", body)
    assert last["done"]
    unloading = {"model": "toy-1:latest", "keep_alive": 0, "prompt": ""}
    assert Bench(play("x")).post("/api/generate", unloading).json()["done"]
    embedded = {"model": "m", "input": ["a", "b"], "prompt": "a\nb"}
    bench = Bench(replies=ReplySettings(embeddings=True), pooling="mean")
    assert len(bench.post("/api/embed", embedded).json()["embeddings"]) == 2


def test_a_silent_stream_repeats_an_empty_chunk() -> None:
    """A comment, or an empty line, is no JSON: clients read each line."""
    sent = sent_in_silence("/api/chat", {"messages": HI}, bool)
    chunks = [json.loads(line) for line in sent.splitlines()]
    assert chunks[0]["message"] == {"role": "assistant", "content": ""}
    assert chunks[0]["done"] is False
    assert "".join(chunk["message"]["content"] for chunk in chunks) == "a"
    assert chunks[-1]["done"]


def test_a_failure_in_the_middle_is_a_line() -> None:
    *_, last = lines(Bench(fail(EngineError("broken"), "a")), "/api/chat", {"messages": HI})
    assert last == {"error": "broken"}


CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
CALLS = (CALL[:20], CALL[20:], CALL[:40])
"""Pieces of a stream: a whole call, and the beginning of a second one."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "expected"), [("limit", [{"a": 1}]), ("eos", [{"a": 1}, {}])])
def test_calls_come_whole(stream: bool, stop: Any, expected: list[Any]) -> None:
    bench = Bench(play(*CALLS, stop=stop))
    asked = {"messages": HI, "tools": [TOOL], "stream": stream}
    chunks = lines(bench, "/api/chat", asked) if stream else [bench.post("/api/chat", asked).json()]
    calls = [call for chunk in chunks for call in chunk["message"].get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in calls] == expected
    assert [call["function"]["index"] for call in calls] == list(range(len(expected)))
    assert chunks[-1]["done_reason"] == ("length" if stop == "limit" else "stop")


def test_an_empty_request_only_has_the_model_loaded() -> None:
    bench = Bench()
    for path, body in (
        ("chat", {"messages": []}),
        ("chat", {}),
        ("generate", {"prompt": ""}),
        ("generate", {}),
    ):
        response = bench.post(f"/api/{path}", {"model": "m", **body})
        assert response.json()["done"] is True
        assert response.json()["done_reason"] == "load"
    assert not bench.worker.requests


def test_embeddings() -> None:
    bench = Bench(replies=ReplySettings(embeddings=True), pooling="mean")
    body = bench.post("/api/embed", {"model": "m", "input": ["abc", "a"]}).json()
    assert [sum(x * x for x in vector) for vector in body["embeddings"]] == pytest.approx(
        [1.0, 1.0]
    )
    assert body["prompt_eval_count"] == 4
    assert bench.post("/api/embed", {"input": "abc", "dimensions": 1}).json()["embeddings"] == [
        [1.0]
    ]
    assert bench.post("/api/embed", {"input": []}).json()["embeddings"] == []
    n = bench.service.admin.n_embed
    assert bench.post("/api/embed", {"input": "a" * (n + 9)}).json()["prompt_eval_count"] == n
    assert bench.post("/api/embed", {"input": "a" * (n + 9), "truncate": False}).status_code == 400


def test_the_list_of_models_has_no_slash_at_its_end() -> None:
    response = Bench(play("x")).client.get("/v1/models/")
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "no such endpoint: /v1/models/"


@pytest.mark.parametrize(
    ("name", "status"), [("toy-1", 200), ("Toy", 200), ("toy-1:latest", 200), ("a/b", 404)]
)
def test_one_model_by_its_name(name: str, status: int) -> None:
    response = Bench(play("x")).client.get(f"/v1/models/{name}")
    assert response.status_code == status
    if status == 200:
        assert response.json()["id"] == name
        assert response.json()["object"] == "model"
    else:
        assert response.json()["error"]["type"] == "not_found_error"
