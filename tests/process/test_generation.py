"""Bound replies, several replies, probabilities and reasoning budgets, over the network from a real
model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from tests.process.conftest import Server

TEMPLATE = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""
USER = {"role": "user", "content": "Hi"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    path: Path = tmp_path_factory.mktemp("template") / "thinking.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return start("tiny-hybrid", "--chat-template-file", str(path), is_f32=True)


QUESTION = [{"role": "user", "content": "Where is it sunny? " * 20}]


def test_structured_output_behind_reasoning(server: Server) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
    }
    (choice,) = server.client.chat(
        QUESTION, response_format=form, reasoning_budget_tokens=8, max_tokens=200, seed=1
    ).body["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning_content"]
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    fields = {"prompt": "Weather:", "json_schema": SCHEMA, "n_predict": 200, "seed": 1}
    body = server.client.post_json("/completion", fields)
    jsonschema.validate(json.loads(body["content"]), SCHEMA)


@pytest.mark.parametrize("budget", [0, 5])
def test_a_budget_ends_the_reasoning(server: Server, budget: int) -> None:
    fields = {"max_tokens": 30, "seed": 2, "ignore_eos": True, "cache_prompt": False}
    free = server.client.chat(QUESTION, **fields).body["choices"][0]["message"]
    bound = server.client.chat(
        QUESTION, **fields, reasoning_budget_tokens=budget, reasoning_budget_message="Now:"
    ).body["choices"][0]
    assert free["content"] == "", "it never stops to think"
    assert bound["message"]["content"]
    thought = bound["message"]["reasoning_content"].rstrip()
    assert thought.endswith("Now:")
    assert free["reasoning_content"].startswith(thought.removesuffix("Now:"))


def test_filling_a_gap(server: Server) -> None:
    fields = {
        "input_prefix": "def f(",
        "input_suffix": "):",
        "n_predict": 4,
        "ignore_eos": True,
    }
    body = server.client.post_json("/infill", fields)
    assert body["tokens_predicted"] == 4
    assert body["prompt"].endswith("<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>")
