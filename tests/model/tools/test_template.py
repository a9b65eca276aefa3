from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from jinja2 import Environment

from tools.generator import CHATML_TEMPLATE

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add"}}


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    return Environment().from_string(CHATML_TEMPLATE).render(messages=messages, **options)


def test_messages_are_chatml() -> None:
    assert render([SYSTEM, USER], add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_content_may_be_parts() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert render([{"role": "user", "content": parts}]) == render([USER])


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'], ids=["mapping", "text"])
def test_a_tool_call_and_its_result(arguments: object) -> None:
    call = {"function": {"name": "add", "arguments": arguments}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    assert render(messages) == (
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER]], ids=["alone", "with system"])
def test_tools_are_listed_in_one_system_message(messages: list[dict[str, Any]]) -> None:
    text = render(messages, tools=[TOOL])
    assert text.count("<|im_start|>system\n") == 1
    assert '\n{"function": {"name": "add"}, "type": "function"}\n' in text


def test_more_messages_only_append() -> None:
    messages = [SYSTEM, USER, {"role": "assistant", "content": "x", "tool_calls": [CALL, CALL]}, USER, USER]
    texts = [render(messages[: n + 1], tools=[TOOL]) for n in range(len(messages))]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)


def test_white_space_settings_of_the_environment_do_not_matter() -> None:
    trimmed = Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHATML_TEMPLATE)
    messages = [SYSTEM, USER, {"role": "assistant", "content": "x", "tool_calls": [CALL]}]
    assert trimmed.render(messages=messages, tools=[TOOL]) == render(messages, tools=[TOOL])
