from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import anthropic
import httpx
import pytest

from tests.process.conftest import Server

SYSTEM = "You answer at length. " * 12


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start(
        "tiny-hybrid", "-c", "65536", "--alias", "tiny", "--api-key", "secret", is_f32=True
    )


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
        yield client


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def asked(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
        "messages": list(messages) or [user("Tell me more")],
        "max_tokens": 12,
        "extra_body": {"temperature": 0},
        **fields,
    }


def test_stream(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**asked())
    with client.messages.stream(**asked()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.cache_read_input_tokens > 0
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == counted(client)


def counted(client: anthropic.Anthropic) -> int:
    fields = asked()
    del fields["max_tokens"], fields["extra_body"]
    return client.messages.count_tokens(**fields).input_tokens


def test_models(client: anthropic.Anthropic) -> None:
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")


def test_errors(client: anthropic.Anthropic) -> None:
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
    }
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(**asked({"role": "user", "content": [image]}))
    with (
        pytest.raises(anthropic.BadRequestError),
        client.messages.stream(**asked(user("x" * 70_000))) as stream,
    ):
        stream.until_done()
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**asked())
    with anthropic.Anthropic(base_url=client.base_url, auth_token="secret", api_key=None) as other:
        assert other.messages.create(**asked()).content


def test_the_tool_runner_sends_the_whole_conversation_without_its_thread(server: Server) -> None:
    """The SDK's tool runner repeats its first request without a thread, which this server does not
    have, and sends every message with each later one: no turn is lost.
    """
    pytest.importorskip("anthropic.lib.threads", reason="this version of the SDK has no threads")
    bodies: list[dict[str, Any]] = []

    @anthropic.beta_tool
    def look(at: Literal["door"]) -> str:
        """Look at a thing."""
        return f"{at} is red"

    def record(request: httpx.Request) -> None:
        bodies.append(json.loads(request.content))

    with anthropic.Anthropic(
        base_url=server.url,
        api_key="secret",
        http_client=anthropic.DefaultHttpxClient(event_hooks={"request": [record]}),
    ) as client:
        runner = client.beta.messages.tool_runner(
            model="tiny",
            max_tokens=256,
            system=SYSTEM,
            messages=[user("What colour is the door?")],
            tools=[look],
            tool_choice={"type": "tool", "name": "look"},
            max_iterations=2,
            extra_body={"temperature": 0},
        )
        replies = list(runner)
    assert len(replies) == 2
    assert replies[0].stop_reason == "tool_use"
    assert ["thread" in body for body in bodies] == [True, False, False]
    assert [[message["role"] for message in body["messages"]] for body in bodies[1:]] == [
        ["user"],
        ["user", "assistant", "user"],
    ]
    assert all(body["system"] == SYSTEM and body["tools"] for body in bodies)
