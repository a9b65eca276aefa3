from __future__ import annotations

from typing import Any

import pytest

from pyctl.server.server_settings import ServerSettings
from tests.unit.server.fake import HI, Bench, Client, play


@pytest.fixture
def client() -> Client:
    return Bench(play()).client


@pytest.mark.parametrize(
    "path",
    [
        "/rerank",
        "/reranking",
        "/v1/rerank",
        "/v1/reranking",
        "/audio/transcriptions",
        "/v1/audio/transcriptions",
    ],
)
def test_what_no_model_here_can(client: Client, path: str) -> None:
    error = client.post(path, json={}).json()["error"]
    assert (error["code"], error["type"]) == (501, "not_supported_error")


@pytest.mark.parametrize("path", ["/tools", "/cors-proxy"])
def test_features_that_are_off(client: Client, path: str) -> None:
    for response in (client.get(path), client.post(path, json={})):
        assert response.status_code == 403
        assert response.json() == {
            "error": {"message": "this feature is disabled", "type": "feature_disabled"}
        }


def test_no_stream_is_kept_unless_its_client_names_a_conversation(client: Client) -> None:
    client.post("/v1/chat/completions", json={"messages": HI, "stream": True})
    assert client.get("/v1/stream").status_code == 400
    assert client.get("/v1/stream?conv_id=x").status_code == 404
    assert client.request("DELETE", "/v1/stream").status_code == 400
    assert client.request("DELETE", "/v1/stream?conv_id=x").status_code == 204
    assert client.post("/v1/streams/lookup", json={"conversation_ids": ["x"]}).json() == []


def test_lora_adapters(client: Client) -> None:
    assert client.get("/lora-adapters").json() == []
    assert client.post("/lora-adapters", json=[]).json() == {"success": True}
    for body in (b"{}", b"x", b"[" * 9999):
        assert client.post("/lora-adapters", content=body).status_code == 400


def test_props_change_only_with_the_flag() -> None:
    for allowed, status in ((False, 501), (True, 200)):
        settings = ServerSettings(change_props=allowed)
        assert Bench(play(), settings=settings).client.post("/props", json={}).status_code == status


def test_scales_of_adapters_stay() -> None:
    bench = Bench(play("x"), lora=(("a.gguf", 0.5),))
    assert bench.client.get("/lora-adapters").json()[0] == {
        "id": 0,
        "path": "a.gguf",
        "scale": 0.5,
        "task_name": "",
        "prompt_prefix": "",
    }


BOTH = [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 1}]


@pytest.mark.parametrize(
    ("entries", "is_kept", "is_kept_for_all"),
    [
        (BOTH, True, True),
        ([*BOTH, {"id": 7, "scale": 1.0}], True, True),
        ([{"id": 0, "scale": 1.0}, *BOTH], True, True),
        ([], True, False),
        (BOTH[:1], False, False),
        (BOTH[1:], False, False),
        ([{"id": 7, "scale": 1.0}], False, False),
        ([{"id": 0, "scale": 1.0}, BOTH[1]], False, False),
        ([{"id": 0}, BOTH[1]], False, False),
    ],
)
def test_an_adapter_that_is_left_out_would_get_0(
    entries: list[Any], is_kept: bool, is_kept_for_all: bool
) -> None:
    bench = Bench(play("x"), lora=(("a.gguf", 0.5), ("b.gguf", 1.0)))
    fields = {"prompt": "x", "messages": HI, "input": "x", "lora": entries}
    for path in (
        "/completion",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
    ):
        given = {
            name: value
            for name, value in fields.items()
            if (path, name) != ("/v1/responses", "prompt")
        }
        response = bench.post(path, given)
        assert response.status_code == (200 if is_kept else 501), (path, response.text)
        assert is_kept or "0 has 0.5, 1 has 1" in response.text
    assert bench.client.post("/lora-adapters", json=entries).status_code == (
        200 if is_kept_for_all else 501
    )
    if not is_kept:
        assert bench.post("/cache/warm", fields).status_code == 501


CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"functions": [{"name": "f"}]}),
        (CHAT, {"function_call": {"name": "f"}}),
        (CHAT, {"modalities": ["text", "audio"]}),
        (CHAT, {"audio": {"voice": "alloy", "format": "wav"}}),
        (CHAT, {"web_search_options": {"search_context_size": "low"}}),
        (CHAT, {"guided_json": {"type": "object"}}),
        (CHAT, {"structured_outputs": {"choice": ["a", "b"]}}),
        (TEXT, {"guided_choice": ["a", "b"]}),
        (TEXT, {"guided_regex": "a+"}),
        (TEXT, {"guided_grammar": "root ::= a"}),
        (MESSAGES, {"n": 2}),
        (MESSAGES, {"mcp_servers": [{"type": "url", "url": "https://example.org", "name": "x"}]}),
        (MESSAGES, {"container": "container_1"}),
        (MESSAGES, {"compaction": {"type": "summarize"}}),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        (MESSAGES, {"tools": [{"name": "f"}, {"type": "bash_20250124", "name": "bash"}]}),
        (RESPONSES, {"background": True}),
        (RESPONSES, {"prompt": {"id": "pmpt_1"}}),
        (RESPONSES, {"n_cmpl": 2}),
        (TEXT, {"best_of": 3, "n": 2}),
        (TEXT, {"suffix": "x"}),
        (TEXT, {"echo": True, "logprobs": 1}),
    ],
)
def test_what_is_not_done_is_refused_in_one_line(path: str, fields: dict[str, Any]) -> None:
    bench = Bench(play("x", probs=(-1.0,)))
    body = (
        {"messages": HI}
        if path in (CHAT, MESSAGES)
        else {"input": "x"}
        if path == RESPONSES
        else {"prompt": "x"}
    )
    for stream in (False, True):
        response = bench.post(path, {**body, **fields, "stream": stream})
        assert response.status_code == 501, response.text
        assert "not supported" in response.text
        assert response.headers["x-should-retry"] == "false"  # the SDKs would repeat a 501
    assert not bench.worker.requests
    nothing = {
        "functions": [],
        "function_call": "auto",
        "modalities": ["text"],
        "audio": None,
        "web_search_options": {},
    }
    nothing |= {
        "n": 1,
        "n_cmpl": None,
        "mcp_servers": [],
        "container": None,
        "best_of": 1,
        "suffix": "",
        "echo": False,
    }
    nothing |= {"compaction": None, "background": False, "thread": None, "tools": []}
    assert bench.post(path, {**body, **nothing}).status_code == 200
