"""Bound replies, several replies, probabilities and reasoning budgets, over the network from a real
model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
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


def post(server: Server, path: str, **fields: Any) -> Any:
    response = httpx.post(server.url + path, json=fields, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def chat(server: Server, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "Where is it sunny? " * 20}]
    return post(server, "/v1/chat/completions", messages=messages, **fields)


def test_structured_output_behind_reasoning(server: Server) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
    }
    (choice,) = chat(
        server, response_format=form, reasoning_budget_tokens=8, max_tokens=200, seed=1
    )["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning_content"]
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    body = post(server, "/completion", prompt="Weather:", json_schema=SCHEMA, n_predict=200, seed=1)
    jsonschema.validate(json.loads(body["content"]), SCHEMA)


@pytest.mark.parametrize("budget", [0, 5])
def test_a_budget_ends_the_reasoning(server: Server, budget: int) -> None:
    fields = {"max_tokens": 30, "seed": 2, "ignore_eos": True, "cache_prompt": False}
    free = chat(server, **fields)["choices"][0]["message"]
    bound = chat(server, **fields, reasoning_budget_tokens=budget, reasoning_budget_message="Now:")[
        "choices"
    ][0]
    assert free["content"] == "", "it never stops to think"
    assert bound["message"]["content"]
    thought = bound["message"]["reasoning_content"].rstrip()
    assert thought.endswith("Now:")
    assert free["reasoning_content"].startswith(thought.removesuffix("Now:"))


def test_filling_a_gap(server: Server) -> None:
    body = post(
        server, "/infill", input_prefix="def f(", input_suffix="):", n_predict=4, ignore_eos=True
    )
    assert body["tokens_predicted"] == 4
    assert body["prompt"].endswith("<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>")
