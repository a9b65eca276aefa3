"""The conversation of a request, with its variables for the template."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.chat.chat_format import ChatRequest
from pyctl.errors import RequestError
from pyctl.requests.body import ChatBody
from pyctl.requests.chat_request import chat_request, parallel_calls, prepare_chat
from pyctl.requests.reply_settings import ReplySettings
from pyctl.requests.request_pool import NOTHING
from tests.unit.server.fake import HI, Bench, play
from tests.unit.server.parts import OPENED


def read(**fields: Any) -> ChatRequest:
    body = ChatBody.from_json({"messages": HI, **fields})
    return chat_request(Bench(play("x")).service, body.conversation, NOTHING)


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"think": True}, {"enable_thinking": True}),
        (
            {"think": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
        ),
        (
            {"think": False, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": False},
        ),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "high", "think": False}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"a": 1}}, {"a": 1}),
    ],
)
def test_switches_of_reasoning_become_variables_of_the_template(
    fields: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    assert read(**fields).template_kwargs == kwargs


@pytest.mark.parametrize(
    ("fields", "continues", "has_header"),
    [
        ({}, None, True),
        ({"add_generation_prompt": False}, None, False),
        ({"continue_final_message": True}, "auto", False),
        ({"continue_final_message": "content"}, "content", False),
        ({"continue_final_message": "auto"}, None, True),
        ({"continue_final_message": False}, None, True),
    ],
)
def test_a_reply_begins_or_goes_on(
    fields: dict[str, Any], continues: str | None, has_header: bool
) -> None:
    request = read(**fields)
    assert request.continue_final_message == continues
    assert request.add_generation_prompt is has_header


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "must be true or false"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "exclude each other",
        ),
    ],
)
def test_fields_that_make_no_conversation(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read(**fields)


@pytest.mark.parametrize(
    ("settings", "fields", "n_tokens"),
    [
        ({}, {}, None),
        ({"reasoning_budget": 7}, {}, 7),
        ({"reasoning_budget": 7}, {"reasoning_budget_tokens": 3}, 3),
        ({}, {"reasoning_control": True}, 2**31 - 1),
    ],
)
def test_the_budget_of_reasoning(
    settings: dict[str, Any], fields: dict[str, Any], n_tokens: int | None
) -> None:
    service = Bench(play("x"), template=OPENED, replies=ReplySettings(**settings)).service
    body = ChatBody.from_json({"messages": HI, **fields})
    limit = prepare_chat(service, body.conversation, body).reasoning
    assert (None if limit is None else limit.n_tokens) == n_tokens
    assert prepare_chat(service, body.conversation).reasoning is None


def test_an_unknown_format_of_reasoning() -> None:
    body = ChatBody.from_json({"messages": HI, "reasoning_format": "xml"})
    with pytest.raises(RequestError, match="'reasoning_format' must be auto"):
        prepare_chat(Bench(play("x")).service, body.conversation, body)


@pytest.mark.parametrize("requested", [True, False])
def test_a_request_overrides_the_template_on_parallel_calls(requested: bool) -> None:
    service = Bench(play("x")).service
    assert parallel_calls(service, requested) is requested
    assert parallel_calls(service, None) is service.chat.capabilities.parallel_calls
