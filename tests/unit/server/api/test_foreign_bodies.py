"""Bodies that no client would send, to servers that see images and to others."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.errors import RequestError
from tests.effort import examples
from tests.pictures import GridReader, image_bytes
from tests.unit.server.fake import Bench, play

NAMES = [
    "messages",
    "input",
    "role",
    "content",
    "type",
    "text",
    "system",
    "tools",
    "tool_choice",
    "name",
    "input_schema",
    "parameters",
    "thinking",
    "source",
    "data",
    "id",
    "call_id",
    "tool_use_id",
    "arguments",
    "output",
    "summary",
    "encrypted_content",
    "stop_sequences",
    "max_tokens",
    "max_output_tokens",
    "budget_tokens",
    "reasoning",
    "effort",
    "format",
    "output_config",
    "include",
    "image_url",
    "url",
    "detail",
    "previous_response_id",
    "metadata",
    "store",
    "instructions",
]
IMAGE = "data:image/png;base64," + base64.b64encode(image_bytes(2, 1)).decode()
WORDS = [
    "user",
    "assistant",
    "system",
    "developer",
    "tool",
    "text",
    "image",
    "document",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_result",
    "message",
    "function",
    "function_call",
    "function_call_output",
    "reasoning",
    "input_text",
    "output_text",
    "refusal",
    "input_image",
    "enabled",
    "disabled",
    "auto",
    "any",
    "none",
    "json_schema",
    "json_object",
    "image_url",
    "base64",
    "url",
    IMAGE,
    IMAGE[:60],
    IMAGE.partition(",")[2],
    "file://a.png",
    "pyctl-reasoning-AAAA",
    "x-anthropic-billing-header:cch=",
]

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)
    ),
    max_leaves=25,
)
SOURCES = st.fixed_dictionaries(
    {"type": st.sampled_from(("base64", "url", "file"))},
    optional={"data": st.sampled_from(WORDS), "url": VALUES},
)
PICTURES = st.one_of(
    st.fixed_dictionaries({"type": st.just("image"), "source": SOURCES | VALUES}),
    st.fixed_dictionaries(
        {"type": st.just("input_image"), "image_url": st.sampled_from(WORDS) | VALUES}
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("image_url"),
            "image_url": st.fixed_dictionaries({"url": st.sampled_from(WORDS)}) | VALUES,
        }
    ),
    st.fixed_dictionaries(
        {"type": st.just("tool_result"), "content": st.just([{"type": "image"}]) | VALUES}
    ),
)
BLOCKS = PICTURES | st.dictionaries(st.sampled_from(NAMES), st.text() | VALUES, max_size=4).flatmap(
    lambda members: st.sampled_from(WORDS).map(lambda kind: {**members, "type": kind})
)
ITEMS = st.builds(
    lambda role, content, more: {**more, "role": role, "content": content},
    st.sampled_from(["user", "assistant", "system", "tool"]),
    st.text() | st.lists(BLOCKS, max_size=4),
    st.dictionaries(st.sampled_from(["type", "status", "id"]), st.sampled_from(WORDS), max_size=2),
)
BODIES = st.builds(
    lambda items, more: {"messages": items, "input": items, **more},
    st.lists(ITEMS, max_size=2) | st.lists(ITEMS | BLOCKS, max_size=4),
    st.just({}) | st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2),
)


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
def test_any_body_is_answered_or_refused(
    path: str, sees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of any JSON has a reply or an error with a message, on every path. It never leads to
    an internal error.
    """

    def nowhere(url: str) -> bytes:
        raise RequestError(f"no network for {url}")

    monkeypatch.setattr("pyctl.requests.remote_images.fetch_image", nowhere)
    bench = Bench(play("a"), images=GridReader() if sees else None)

    @given(BODIES)
    @settings(max_examples=examples(100), deadline=None)
    def ask(body: dict[str, Any]) -> None:
        response = bench.post(path, body)
        assert response.status_code in (200, 400, 501), response.text
        if response.status_code != 200:
            assert response.json()["error"]["message"]

    ask()
    assert bench.worker.requests, "some are answered"
