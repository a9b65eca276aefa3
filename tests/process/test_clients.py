"""Sessions of real programs are served with Qwen3.5's template, and each token is evaluated once
(docs/clients.md).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.client import events, named_events
from tests.process.client_sessions import CHAT, MESSAGES, RESPONSES, SESSIONS, Asked, Replied
from tests.process.conftest import Server
from tests.unit.chat.conftest import unpacked

SLACK = 48
"""Tokens that may be evaluated again where a prompt goes on: a header, and tokens that join
differently at a seam.
"""

UNMARKED = 512
"""Likewise where a prompt has no marks: what follows the last end of a batch."""


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    template = unpacked("templates/Qwen3.5-4B.jinja")
    flags = ["--chat-template-file", str(template), *shlex.split("-c 65536 -np 4 -ub 512 -n 400")]
    return start("tiny-hybrid", *flags)


def whole(reply: Any) -> Any:
    """Return a chat completion that was not streamed, as the one event of a stream."""
    return {
        **reply,
        "choices": [{"index": 0, "delta": choice["message"]} for choice in reply["choices"]],
    }


def by_chat(found: list[Any]) -> Replied:
    content = reasoning = ""
    calls: dict[int, Any] = {}
    for event in found:
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(
                    part["index"], {"id": part.get("id"), "type": "function", "function": {}}
                )
                for name, value in part["function"].items():
                    call["function"][name] = call["function"].get(name, "") + value
    return Replied(content, reasoning, list(calls.values()))


def by_messages(found: list[Any]) -> Replied:
    texts: dict[str, str] = {"text_delta": "", "thinking_delta": ""}
    calls: list[Any] = []
    for event in found:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            block = event["content_block"]
            calls.append({"id": block["id"], "function": {"name": block["name"], "arguments": ""}})
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                calls[-1]["function"]["arguments"] += delta["partial_json"]
            elif delta["type"] in texts:
                texts[delta["type"]] += delta[
                    "text" if delta["type"] == "text_delta" else "thinking"
                ]
    assert found[-1]["type"] == "message_stop"
    return Replied(texts["text_delta"], texts["thinking_delta"], calls)


def by_responses(found: list[Any]) -> Replied:
    assert found[-1]["type"] == "response.completed"
    return Replied("", "", items=found[-1]["response"]["output"])


def by_completion(found: list[Any]) -> Replied:
    return Replied("".join(event["content"] for event in found), "")


READERS = {CHAT: by_chat, MESSAGES: by_messages, RESPONSES: by_responses}


def events_of(asked: Asked, response: httpx.Response) -> list[Any]:
    """Return the events of a reply, or the whole reply as one."""
    if not asked.body.get("stream"):
        return [whole(response.json())]
    if asked.path in (MESSAGES, RESPONSES):
        return named_events(response.content)
    return [event for event in events(response.content) if event != "[DONE]"]


def send(server: Server, asked: Asked) -> tuple[Replied, int, int]:
    """Return the reply, and how many tokens of its prompt were cached and evaluated."""
    response = server.client.post(asked.path, asked.body)
    assert response.status_code == 200, response.text
    found = events_of(asked, response)
    counts = dict(part.split("=") for part in response.headers["x-pyctl-cache"].split("; "))
    reply = READERS.get(asked.path, by_completion)(found)
    usage = [event.get("usage") or event.get("response", {}).get("usage") or {} for event in found]
    n_tokens = max(one.get("completion_tokens", one.get("output_tokens", 0)) for one in usage)
    return replace(reply, n_tokens=n_tokens), int(counts["cached"]), int(counts["evaluated"])


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_is_served_and_each_turn_evaluates_what_is_new(server: Server, name: str) -> None:
    """Each turn takes from the cache what its thread has sent before, with the reply where the
    client returns it unchanged: any token that is evaluated twice is time that the user waits.
    """
    session = SESSIONS[name]()
    last: dict[str, tuple[int, int]] = {}
    asked: Asked | None = next(session)
    while asked is not None:
        reply, cached, evaluated = send(server, asked)
        if asked.thread in last:
            n_prompt, n_reply = last[asked.thread]
            known = (
                n_prompt + n_reply if asked.known == "and reply" else int(n_prompt * asked.known)
            )
            slack = SLACK if asked.path != "/completion" else UNMARKED
            assert cached > known - slack, f"{cached} of {known} tokens that were known"
        last[asked.thread] = cached + evaluated, reply.n_tokens
        try:
            asked = session.send(reply)
        except StopIteration:
            asked = None
