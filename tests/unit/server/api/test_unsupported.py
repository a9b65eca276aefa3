from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pyctl.server.server_settings import ServerSettings
from tests.case import Case
from tests.client import CHAT, HI, Client
from tests.unit.server.fake import Bench, play


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
        "/v1/systemone",
    ],
)
def test_what_no_model_here_can(client: Client, path: str) -> None:
    Case(path, {}, 501, "").check(client)


@pytest.mark.parametrize("path", ["/tools", "/cors-proxy"])
def test_features_that_are_off(client: Client, path: str) -> None:
    for response in (client.get(path), client.post(path, {})):
        assert response.status_code == 403
        assert response.json() == {
            "error": {"message": "this feature is disabled", "type": "feature_disabled"}
        }


def test_lora_adapters(client: Client) -> None:
    assert client.get("/lora-adapters").json() == []
    assert client.post("/lora-adapters", []).json() == {"success": True}
    for body in (b"{}", b"x", b"[" * 9999):
        assert client.post("/lora-adapters", content=body).status_code == 400


def test_props_change_only_with_the_flag() -> None:
    for allowed, status in ((False, 501), (True, 200)):
        settings = ServerSettings(change_props=allowed)
        assert Bench(play(), settings=settings).client.post("/props", {}).status_code == status


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
    """A list of adapters may only repeat the scales that they have, since an adapter it leaves out
    would count as 0. Anything else is refused with the scales in force.
    """
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
    assert bench.client.post("/lora-adapters", entries).status_code == (
        200 if is_kept_for_all else 501
    )
    if not is_kept:
        assert bench.post("/cache/warm", fields).status_code == 501


MESSAGES = "/v1/messages"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"


@pytest.mark.parametrize(
    "case",
    [
        Case(CHAT, {"messages": HI, "functions": [{"name": "f"}]}, 501, "not supported"),
        Case(CHAT, {"messages": HI, "function_call": {"name": "f"}}, 501, "not supported"),
        Case(CHAT, {"messages": HI, "modalities": ["text", "audio"]}, 501, "not supported"),
        Case(
            CHAT,
            {"messages": HI, "audio": {"voice": "alloy", "format": "wav"}},
            501,
            "not supported",
        ),
        Case(
            CHAT,
            {"messages": HI, "web_search_options": {"search_context_size": "low"}},
            501,
            "not supported",
        ),
        Case(CHAT, {"messages": HI, "guided_json": {"type": "object"}}, 501, "not supported"),
        Case(
            CHAT,
            {"messages": HI, "structured_outputs": {"choice": ["a", "b"]}},
            501,
            "not supported",
        ),
        Case(TEXT, {"prompt": "x", "guided_choice": ["a", "b"]}, 501, "not supported"),
        Case(TEXT, {"prompt": "x", "guided_regex": "a+"}, 501, "not supported"),
        Case(TEXT, {"prompt": "x", "guided_grammar": "root ::= a"}, 501, "not supported"),
        Case(MESSAGES, {"messages": HI, "n": 2}, 501, "not supported"),
        Case(
            MESSAGES,
            {
                "messages": HI,
                "mcp_servers": [{"type": "url", "url": "https://example.org", "name": "x"}],
            },
            501,
            "not supported",
        ),
        Case(MESSAGES, {"messages": HI, "container": "container_1"}, 501, "not supported"),
        Case(MESSAGES, {"messages": HI, "compaction": {"type": "summarize"}}, 501, "not supported"),
        Case(
            MESSAGES,
            {"messages": HI, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            501,
            "not supported",
        ),
        Case(
            MESSAGES,
            {"messages": HI, "tools": [{"name": "f"}, {"type": "bash_20250124", "name": "bash"}]},
            501,
            "not supported",
        ),
        Case(RESPONSES, {"input": "x", "background": True}, 501, "not supported"),
        Case(RESPONSES, {"input": "x", "prompt": {"id": "pmpt_1"}}, 501, "not supported"),
        Case(RESPONSES, {"input": "x", "n_cmpl": 2}, 501, "not supported"),
        Case(TEXT, {"prompt": "x", "best_of": 3, "n": 2}, 501, "not supported"),
        Case(TEXT, {"prompt": "x", "suffix": "x"}, 501, "not supported"),
        Case(TEXT, {"prompt": "x", "echo": True, "logprobs": 1}, 501, "not supported"),
    ],
    ids=str,
)
def test_what_is_not_done_is_refused_in_one_line(case: Case) -> None:
    bench = Bench(play("x", probs=(-1.0,)))
    for stream in (False, True):
        response = replace(case, body={**case.body, "stream": stream}).send(bench.client)
        assert response.status_code == case.status, response.text
        assert case.error in response.text
        assert response.headers["x-should-retry"] == "false"  # the SDKs would repeat a 501
    assert not bench.worker.requests


NOTHING = {
    "functions": [],
    "function_call": "auto",
    "modalities": ["text"],
    "audio": None,
    "web_search_options": {},
    "n": 1,
    "n_cmpl": None,
    "mcp_servers": [],
    "container": None,
    "best_of": 1,
    "suffix": "",
    "echo": False,
    "compaction": None,
    "background": False,
    "thread": None,
    "tools": [],
}
"""Fields that are refused for other values."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI}),
        (MESSAGES, {"messages": HI}),
        (RESPONSES, {"input": "x"}),
        (TEXT, {"prompt": "x"}),
    ],
)
def test_a_field_that_asks_for_nothing_is_served(path: str, body: dict[str, Any]) -> None:
    bench = Bench(play("x", probs=(-1.0,)))
    assert bench.post(path, {**body, **NOTHING}).status_code == 200
