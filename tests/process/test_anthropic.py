from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
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
