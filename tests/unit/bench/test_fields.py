"""The fields of recorded requests, and whether pyctl reads them."""

from __future__ import annotations

from typing import Any

import pytest

from bench.clients.fields import MESSAGES, RESPONSES, field_places, has_effect, reason_of
from tests.process.client_sessions import SESSIONS

MESSAGE: dict[str, Any] = {
    "model": "any",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    "max_tokens": 8,
    "metadata": {"user_id": "7"},
}
"""A small body of Anthropic's API."""


def first_body(program: str) -> dict[str, Any]:
    return next(SESSIONS[program]()).body


def is_read(path: str, body: dict[str, Any], field: str) -> bool:
    return has_effect(path, body, field_places(body)[field])


def test_fields_are_named_by_the_type_or_role_of_their_items() -> None:
    assert set(field_places(MESSAGE)) == {
        *("model", "max_tokens", "metadata", "messages:user.role"),
        *("messages:user.content:text.type", "messages:user.content:text.text"),
    }


def test_a_deep_body_needs_no_recursion() -> None:
    body: dict[str, Any] = {}
    inner = body
    for _ in range(5_000):
        inner["a"] = {}
        inner = inner["a"]
    assert len(field_places(body)) == 1


@pytest.mark.parametrize("field", ["max_tokens", "messages:user.content:text.text"])
def test_a_field_that_changes_the_request_is_read(field: str) -> None:
    assert is_read(MESSAGES, MESSAGE, field)


@pytest.mark.parametrize("field", ["metadata", "model"])
def test_a_field_that_changes_nothing_has_a_reason(field: str) -> None:
    assert not is_read(MESSAGES, MESSAGE, field)
    assert reason_of(MESSAGES, field)


def test_an_unknown_field_has_no_effect_and_no_reason() -> None:
    assert not is_read(MESSAGES, {**MESSAGE, "of_tomorrow": 1}, "of_tomorrow")
    assert reason_of(MESSAGES, "of_tomorrow") == ""


def test_a_refused_value_is_read() -> None:
    assert is_read(MESSAGES, MESSAGE, "messages:user.content:text.type")


@pytest.mark.parametrize(("path", "program"), [(MESSAGES, "claude code"), (RESPONSES, "codex")])
def test_no_field_of_a_program_is_dropped_in_silence(path: str, program: str) -> None:
    """The bodies have the fields that the programs send (`bench.clients` records them)."""
    body = first_body(program)
    dropped = [
        field
        for field, place in field_places(body).items()
        if not has_effect(path, body, place) and not reason_of(path, field)
    ]
    assert dropped == []
