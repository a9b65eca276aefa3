from __future__ import annotations

import json
from typing import Any

import pytest

from pyctl.chat.call_formats.call_format import CallFormat
from pyctl.chat.call_formats.hermes import HermesFormat
from pyctl.chat.call_formats.qwen import QwenFormat
from pyctl.chat.call_formats.registry import FALLBACK, find_call_format
from pyctl.chat.chat_format import ChatFormat, ChatRequest
from pyctl.chat.constraint import Constraint
from pyctl.chat.reasoning import THINK, ReplyPart
from pyctl.chat.replay import Replay
from pyctl.chat.template import Template, TemplateCapabilities
from pyctl.chat.tools import Tools
from pyctl.errors import RequestError
from tests.chat import toy
from tests.chat.accepted import accepts
from tests.chat.conftest import unpacked

DAYS = {"type": "integer"}
CITY = {"type": "string"}
PARAMETERS = {"type": "object", "properties": {"city": CITY, "days": DAYS, "how": {"enum": ["a", "b"]}}}


def tools(parallel: bool = True, forced: bool = True, **parameters: Any) -> Tools:
    function = {"name": "look_up", "parameters": {**PARAMETERS, **parameters}}
    return Tools.of([{"type": "function", "function": function}], parallel, forced)


def bound(form: CallFormat, tools: Tools, part: ReplyPart = "content") -> Constraint:
    return form.constraint(tools, THINK, part)


def xml(*arguments: str) -> str:
    return f"<tool_call>\n<function=look_up>\n{''.join(arguments)}</function>\n</tool_call>"


PARIS = "<parameter=city>\nParis <3\n</para>\n</parameter>\n"
THREE = "<parameter=days>\n3\n</parameter>\n"
HOW = "<parameter=how>\na\n</parameter>\n"


@pytest.mark.parametrize(
    ("required", "text", "accepted"),
    [
        ([], xml(), True),
        ([], xml(THREE, PARIS), True),
        (["city", "days"], xml(THREE, PARIS), True),
        (["city", "days"], xml(PARIS, HOW, THREE, HOW), True),
        (["city", "days"], xml(PARIS), False),
        (["city", "days"], xml(), False),
        ([], xml(THREE.replace("3", "three")), False),
        ([], xml(HOW.replace("\na", "\nc")), False),
        ([], xml().replace("look_up", "other"), False),
        ([], "Well. " + xml(), False),
        ([], "", False),
        ([], "\n" + xml() + "\n" + xml(), True),
    ],
)
def test_calls_between_tags(required: list[str], text: str, accepted: bool) -> None:
    assert accepts(bound(QwenFormat(), tools(required=required)), text) is accepted


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [({"city": "P", "days": 3}, True), ({"days": 3}, False), ({"city": "P", "days": "x"}, False)],
)
def test_calls_as_json(arguments: Any, accepted: bool) -> None:
    grammar = bound(HermesFormat(), tools(required=["city"]))
    call = json.dumps({"name": "look_up", "arguments": arguments})
    assert accepts(grammar, f"<tool_call>\n{call}\n</tool_call>") is accepted


def test_one_call_and_no_more() -> None:
    grammar = bound(QwenFormat(), tools(parallel=False))
    assert accepts(grammar, xml())
    assert not accepts(grammar, xml() + "\n" + xml())


def test_reasoning_first() -> None:
    always = bound(QwenFormat(), tools(), "reasoning")
    assert accepts(always, f"So </thin\n</think>\n\n{xml()}")
    assert not accepts(always, xml())
    maybe = bound(QwenFormat(), tools(), "start")
    assert accepts(maybe, f"<think>So</think>\n\n{xml()}")
    assert accepts(maybe, xml())


def test_many_required_arguments_come_in_the_order_of_the_schema() -> None:
    many = {f"a{i}": DAYS for i in range(7)}
    grammar = bound(QwenFormat(), tools(properties=many, required=list(many)))
    values = [f"<parameter={key}>\n1\n</parameter>\n" for key in many]
    assert accepts(grammar, xml(*values))
    assert not accepts(grammar, xml(*reversed(values)))


def test_a_tool_without_a_schema_takes_what_it_says() -> None:
    none = Tools.of([{"type": "function", "function": {"name": "look_up"}}])
    assert accepts(bound(QwenFormat(), none), xml())
    assert not accepts(bound(QwenFormat(), none), xml(THREE))
    assert accepts(bound(QwenFormat(), tools(properties={}, additionalProperties=True)), xml(THREE, PARIS))
    assert accepts(bound(HermesFormat(), none), '<tool_call>\n{"name": "look_up", "arguments": {"a": 1}}\n</tool_call>')


def test_a_schema_that_cannot_be_converted_is_refused() -> None:
    with pytest.raises(RequestError):
        bound(HermesFormat(), tools(properties={"a": {"$ref": "https://example.org"}}, required=["a"]))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("Qwen3.5-4B", QwenFormat),
        ("Qwen3-Coder", QwenFormat),
        ("Qwen-Qwen3-0.6B", HermesFormat),
        ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", HermesFormat),
    ],
)
def test_the_form_is_found_by_rendering(name: str, form: type[CallFormat]) -> None:
    template = Template(unpacked(f"templates/{name}.jinja").read_text())
    assert type(find_call_format(template, TemplateCapabilities.of(template))) is form
    plain = Template(toy.LLAMA3)
    assert find_call_format(plain, TemplateCapabilities.of(plain)) is FALLBACK


def test_only_what_needs_a_grammar_gets_one(qwen_template: str) -> None:
    chat = ChatFormat(Template(qwen_template), toy.chatml_tokenizer(), replay=Replay("off"))
    hi = [{"role": "user", "content": "Hi"}]

    def bound_by(tools: list[dict[str, Any]] | None, **fields: Any) -> Constraint | None:
        return chat.prepare(ChatRequest(hi, tools=tools, **fields)).constraint

    tool = {"type": "function", "function": {"name": "f"}}
    assert bound_by(None) is bound_by([tool]) is None
    forced = bound_by([tool], tool_choice="required")
    assert forced is not None
    assert "/(?s:.*)/" in forced.grammar  # reasoning comes first
    plain = bound_by([tool], tool_choice="required", template_kwargs={"enable_thinking": False})
    assert plain is not None
    assert "/(?s:.*)/" not in plain.grammar
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    for lazy in (bound_by([tool], parallel_tool_calls=False), bound_by([strict])):
        assert lazy is not None
        assert "/(?s:.*)/" not in lazy.grammar
        assert lazy.triggers == ("(<tool_call>)",)
