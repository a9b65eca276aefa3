"""Reasoning budgets: the fields and settings that set them, and the value that the engine gets."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.chat.reasoning import ReasoningLimit
from pyctl.requests.reply_settings import ReplySettings
from tests.client import HI
from tests.unit.chat.toy import chatml_tokenizer
from tests.unit.server.fake import Bench, play
from tests.unit.server.parts import OPENED

SPECIAL = chatml_tokenizer().special_tokens()
THINK = SPECIAL["<think>"]
END = SPECIAL["</think>"]
CALL = SPECIAL["<tool_call>"]
LINE = 10
TEXTS = {THINK: b"<think>", END: b"</think>", CALL: b"<tool_call>"}


def limit_of(
    replies: ReplySettings | None = None, path: str = "/v1/chat/completions", **fields: Any
) -> ReasoningLimit | None:
    bench = Bench(play("x"), template=OPENED, replies=replies)
    response = bench.post(path, {"messages": HI, "prompt": "x", **fields})
    assert response.status_code == 200, response.text
    return bench.worker.requests[0].reasoning


@pytest.mark.parametrize(
    ("fields", "n_tokens"),
    [
        ({"reasoning_budget_tokens": 5}, 5),
        ({"thinking_budget_tokens": 6}, 6),
        ({"reasoning_budget_tokens": 0, "thinking_budget_tokens": 6}, 0),
        ({"reasoning_budget_tokens": -1}, None),
        ({"reasoning_control": True}, 2**31 - 1),
        ({"reasoning_control": True, "reasoning_budget_tokens": 3}, 3),
        ({}, None),
    ],
)
def test_fields(fields: dict[str, Any], n_tokens: int | None) -> None:
    limit = limit_of(**fields)
    assert (None if limit is None else limit.n_tokens) == n_tokens


def test_the_servers_own_budget_is_the_default() -> None:
    replies = ReplySettings(reasoning_budget=9, reasoning_budget_message="So:")
    limit = limit_of(replies)
    ends = ("</think>", "<tool_call>")
    assert limit == ReasoningLimit(9, "<think>", ends, (*b"So:", END), (THINK, LINE), TEXTS)
    assert limit_of(replies, reasoning_budget_message="").forced == (END,)
    assert limit_of(replies, reasoning_budget_tokens=2).n_tokens == 2
    assert limit_of(replies, path="/completion") is None, "a raw prompt names no tags"


def test_reasoning_that_goes_on_counts_what_is_there() -> None:
    messages = [*HI, {"role": "assistant", "content": "", "reasoning_content": "hm"}]
    bench = Bench(
        play("x"),
        template=OPENED.replace(
            "+ m.content", "+ '<think>\\n' + (m.reasoning_content or '') + m.content"
        ),
    )
    bench.chat(messages=messages, reasoning_budget_tokens=4)
    limit = bench.worker.requests[0].reasoning
    assert limit.read == (THINK, LINE, *b"hm")


def test_a_raw_prompt_names_its_tags() -> None:
    tags = {"reasoning_budget_start_tag": "<think>", "reasoning_budget_end_tag": "</think>"}
    limit = limit_of(
        path="/completion", reasoning_budget_tokens=3, generation_prompt="<think>", **tags
    )
    texts = {THINK: b"<think>", END: b"</think>"}
    assert limit == ReasoningLimit(
        3, "<think>", ("</think>",), (END,), (THINK,), texts, recurs=True
    )


def test_qwens_newer_form_ends_on_a_line_of_its_own() -> None:
    call = "{%- for call in m.tool_calls or [] -%}{{- '<tool_call><function=sample>' -}}"
    call += "{%- for key, value in call.function.arguments.items() -%}"
    call += "{{- '<parameter=' + key + '>' + value + '</parameter>' -}}{%- endfor -%}"
    call += "{{- '</function></tool_call>' -}}{%- endfor -%}{%- endfor -%}"
    bench = Bench(play("x"), template=OPENED.replace("{%- endfor -%}", call, 1))
    bench.chat(reasoning_budget_tokens=4)
    limit = bench.worker.requests[0].reasoning
    assert limit.end_texts == ("\n</think>", "</think>", "<tool_call>")
    assert limit.forced == (LINE, END)
