"""Marks of ``cache_control``, and what they announce."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.errors import RequestError
from pyctl.server.api.anthropic_cache import retention_fields
from tests.unit.server.api.anthropic_messages import HI, converted, text, user


def mark(**fields: Any) -> dict[str, Any]:
    return {"cache_control": {"type": "ephemeral", **fields}}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"messages": [user(text("a", **mark()))]}, {}),
        (mark(ttl="5m"), {"prompt_seconds": 300}),
        ({"system": [text("a", **mark(ttl="1h"))]}, {"head_seconds": 3600}),
        ({"tools": [{"name": "look", **mark(ttl="5m")}]}, {"head_seconds": 300}),
        ({"messages": [user(text("a", **mark(ttl="1h")))]}, {"prompt_seconds": 3600}),
        (mark(evict_on_complete=True), {"evict_on_complete": True}),
        (mark(evict_on_complete=False), {}),
        ({"cache_control": None, "system": "a", "messages": [HI], "tools": [7]}, {}),
    ],
)
def test_a_mark_announces_the_part_that_it_is_in(values: Any, expected: Any) -> None:
    assert retention_fields(values) == expected


def test_the_longest_of_several_marks_counts() -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [text("a", **mark(ttl="1h"))],
    }
    values = {**mark(ttl="5m"), "messages": [user(result)]}
    assert retention_fields(values) == {"prompt_seconds": 3600}


@pytest.mark.parametrize("ttl", ["2h", "", 300, ["5m"]])
def test_a_wrong_ttl_is_refused(ttl: Any) -> None:
    with pytest.raises(RequestError, match="5m or 1h"):
        retention_fields(mark(ttl=ttl))


def test_the_announcement_is_a_field_of_the_chat() -> None:
    fields = converted([HI], **mark(ttl="5m"))
    assert fields["cache_retention"] == {"prompt_seconds": 300}
    own = converted([HI], **mark(ttl="5m"), cache_retention={"prompt_seconds": 7})
    assert own["cache_retention"] == {"prompt_seconds": 7}
    assert "cache_retention" not in converted([HI])
