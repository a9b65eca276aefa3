from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pyctl.chat.call_formats import FORMATS, CallConstraintCache
from pyctl.chat.call_formats.call_format import CallFormat
from pyctl.chat.call_formats.families import FAMILIES, HERMES, QWEN
from pyctl.chat.chat_format import ChatFormat, ChatRequest
from pyctl.chat.constraint import Constraint
from pyctl.chat.replay import Replay
from pyctl.chat.reply import BRACKETS, THINK, ReplyPart
from pyctl.chat.template import Template
from pyctl.chat.tool_definitions import Tools
from pyctl.errors import RequestError
from tests.unit.chat import toy
from tests.unit.chat.accepted import accepts
from tests.unit.chat.parsing import parse_reply

DAYS = {"type": "integer"}
CITY = {"type": "string"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": CITY, "days": DAYS, "how": {"enum": ["a", "b"]}},
}


def tools(parallel: bool = True, forced: bool = True, **parameters: Any) -> Tools:
    function = {"name": "look_up", "parameters": {**PARAMETERS, **parameters}}
    return Tools.from_request([{"type": "function", "function": function}], parallel, forced)


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
    assert accepts(bound(QWEN, tools(required=required)), text) is accepted


LEFT = ({"const": "left"}, {"enum": ["left"]}, {"$ref": "#/$defs/side"})
OPTIONAL = {"anyOf": [{"enum": ["left", "right"]}, {"type": "null"}]}
LFM2 = next(form for form in FAMILIES if form.name == "LFM2")


@pytest.mark.parametrize(
    ("form", "side", "good", "bad"),
    [
        *((QWEN, side, ("left",), ("right",)) for side in LEFT),
        (QWEN, OPTIONAL, ("left", "null"), ("up", "nul")),
        (LFM2, OPTIONAL, ("'left'", "None"), ("'None'", "'up'", "null")),
    ],
)
def test_words_of_an_argument_are_those_of_the_schema(
    form: CallFormat, side: Any, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    grammar = bound(
        form, tools(properties={"side": side}, **{"$defs": {"side": {"const": "left"}}})
    )
    for word in (*good, *bad):
        literal = f"<|tool_call_start|>[look_up(side={word})]<|tool_call_end|>"
        call = literal if form is LFM2 else xml(f"<parameter=side>\n{word}\n</parameter>\n")
        assert accepts(grammar, call) is (word in good), word


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("'don't'", "don't"),
        ("'it's \"so\"'", 'it\'s "so"'),
        ("'dogs' bones'", "dogs' bones"),
        ("'a\\', b=\\'c'", "a', b='c"),
        ('"it\'s"', "it's"),
        ("''", ""),
        ("'x''", "x'"),
    ],
)
def test_quotes_in_arguments_as_python_writes_them(value: str, read: str) -> None:
    """A reply may have them, and they are read as they were meant."""
    known = tools(properties={"side": {"type": "string"}, "b": {"type": "integer"}})
    grammar = bound(LFM2, known)
    for rest in ("", ", b=3"):
        call = f"<|tool_call_start|>[look_up(side={value}{rest})]<|tool_call_end|>"
        assert accepts(grammar, call), call
        _, _, ((name, arguments),) = parse_reply(LFM2, list(call), known, "content")
        assert name == "look_up"
        assert json.loads(arguments) == {"side": read, **({"b": 3} if rest else {})}


def test_words_with_quotes_and_letters_of_other_languages() -> None:
    grammar = bound(LFM2, tools(properties={"side": {"enum": ["don't", "über", 'a"b']}}))
    for word in ("'don\\'t'", "'über'", "'a\"b'"):
        assert accepts(grammar, f"<|tool_call_start|>[look_up(side={word})]<|tool_call_end|>"), word


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [({"city": "P", "days": 3}, True), ({"days": 3}, False), ({"city": "P", "days": "x"}, False)],
)
def test_calls_as_json(arguments: Any, accepted: bool) -> None:
    grammar = bound(HERMES, tools(required=["city"]))
    call = json.dumps({"name": "look_up", "arguments": arguments})
    assert accepts(grammar, f"<tool_call>\n{call}\n</tool_call>") is accepted


def test_one_call_and_no_more() -> None:
    grammar = bound(QWEN, tools(parallel=False))
    assert accepts(grammar, xml())
    assert not accepts(grammar, xml() + "\n" + xml())


def test_reasoning_first() -> None:
    always = bound(QWEN, tools(), "reasoning")
    assert accepts(always, f"So </thin\n</think>\n\n{xml()}")
    assert not accepts(always, xml())
    maybe = bound(QWEN, tools(), "start")
    assert accepts(maybe, f"<think>So</think>\n\n{xml()}")
    assert accepts(maybe, xml())


def test_many_required_arguments_come_in_the_order_of_the_schema() -> None:
    many = {f"a{i}": DAYS for i in range(7)}
    grammar = bound(QWEN, tools(properties=many, required=list(many)))
    values = [f"<parameter={key}>\n1\n</parameter>\n" for key in many]
    assert accepts(grammar, xml(*values))
    assert not accepts(grammar, xml(*reversed(values)))


def test_a_tool_without_a_schema_takes_what_it_says() -> None:
    none = Tools.from_request([{"type": "function", "function": {"name": "look_up"}}])
    assert accepts(bound(QWEN, none), xml())
    assert not accepts(bound(QWEN, none), xml(THREE))
    assert accepts(bound(QWEN, tools(properties={}, additionalProperties=True)), xml(THREE, PARIS))
    assert accepts(
        bound(HERMES, none), '<tool_call>\n{"name": "look_up", "arguments": {"a": 1}}\n</tool_call>'
    )


def test_a_schema_that_cannot_be_converted_is_refused() -> None:
    with pytest.raises(RequestError):
        bound(HERMES, tools(properties={"a": {"$ref": "https://example.org"}}, required=["a"]))


def test_calls_are_bound_whenever_tools_can_be_called(qwen_template: str) -> None:
    """Requests without callable tools have no grammar. A required call is bound from the start, an
    optional one only after its trigger, and equal tools share one grammar.
    """
    chat = ChatFormat(Template(qwen_template), toy.chatml_tokenizer(), replay=Replay("off"))
    hi = [{"role": "user", "content": "Hi"}]

    def bound_by(tools: list[dict[str, Any]] | None, **fields: Any) -> Constraint | None:
        return chat.prepare(ChatRequest(hi, tools=tools, **fields)).constraint

    tool = {"type": "function", "function": {"name": "f"}}
    assert (
        bound_by(None)
        is bound_by([tool], tool_choice="none")
        is bound_by([tool], parse_tool_calls=False)
        is None
    )
    forced = bound_by([tool], tool_choice="required")
    assert "/(?s:.*)/" in forced.grammar  # reasoning comes first
    plain = bound_by([tool], tool_choice="required", template_kwargs={"enable_thinking": False})
    assert "/(?s:.*)/" not in plain.grammar
    lazy = bound_by([tool])
    assert lazy.triggers == ("(<tool_call>)",)
    assert "/(?s:.*)/" not in lazy.grammar
    assert lazy.hidden is None  # a call interrupts the reasoning
    assert bound_by([tool]) is lazy, "made once for the same tools"
    assert bound_by([tool], parallel_tool_calls=False) != lazy


OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("part", ["content", "reasoning", "start"])
@pytest.mark.parametrize("form", [QWEN, HERMES], ids=lambda form: form.name)
def test_a_reply_with_a_schema_is_json_or_a_call(form: CallFormat, part: ReplyPart) -> None:
    block = {"content": "", "reasoning": "Well.</think>\n\n", "start": "<think>Well.</think>\n\n"}[
        part
    ]
    as_json = '<tool_call>\n{"name": "look_up", "arguments": {"days": 3}}\n</tool_call>'
    call = xml(THREE) if form is QWEN else as_json
    made = CallConstraintCache(form, THINK, {}).constraint(tools(forced=False), part, OBJECT)
    assert not made.triggers
    for text, accepted in (
        ('{"a": true}', True),
        (call, True),
        ('{"b": true}', False),
        ("Well", False),
        ("", False),
    ):
        assert accepts(made, block + text) is accepted, text
    assert not accepts(made, f'{block}{{"a": true}}{call}')


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_no_call_format_stands_in_the_way_of_json(form: CallFormat) -> None:
    tags = form.tags("")
    made = form.constraint(
        tools(forced=False), tags, "content", schema={"type": ["object", "array"]}
    )
    for text in ('{"name": "look_up", "x": [1]}', '{"name": 5}', '["a"]', "{}"):
        assert accepts(made, text), text
    assert not accepts(made, "Well")


def test_a_forced_call_goes_before_a_schema(qwen_template: str) -> None:
    """A schema and a required call exclude each other, and the call wins. An optional call leaves
    both open, and no tool leaves the schema alone.
    """
    chat = ChatFormat(Template(qwen_template), toy.chatml_tokenizer(), replay=Replay("off"))
    tool = {"type": "function", "function": {"name": "f"}}

    def bound_by(**fields: Any) -> Constraint:
        made = chat.prepare(ChatRequest([{"role": "user", "content": "Hi"}], **fields)).constraint
        assert made is not None
        return made

    schema_alone = bound_by(schema=OBJECT)
    forced = bound_by(tools=[tool], tool_choice="required")
    assert bound_by(tools=[tool], tool_choice="required", schema=OBJECT) == forced
    assert bound_by(tools=[tool], tool_choice="none", schema=OBJECT) == schema_alone
    either = bound_by(tools=[tool], schema=OBJECT)
    assert either not in (schema_alone, forced)
    assert bound_by(tools=[tool], schema=OBJECT) is either, (
        "made once for the same tools and schema"
    )
    with pytest.raises(RequestError, match="json_schema"):
        bound_by(tools=[tool], schema={"type": "any"})


WRONG = [
    {"type": "any"},
    {"$ref": "https://example.org"},
    {"$ref": "#/nowhere"},
    {"type": "string", "pattern": "("},
    {"type": "integer", "minimum": "x"},
    {"enum": []},
    7,
]


def offered(
    *properties: Mapping[str, Any], required: Sequence[str] = (), **function: Any
) -> list[dict[str, Any]]:
    functions = [
        {
            "name": f"f{n}",
            "parameters": {"type": "object", "properties": each, "required": [*required]},
            **function,
        }
        for n, each in enumerate(properties)
    ]
    return [{"type": "function", "function": function} for function in functions]


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("wrong", WRONG, ids=json.dumps)
def test_an_argument_whose_schema_cannot_be_converted_is_any_json(wrong: Any, forced: bool) -> None:
    tools = Tools.from_request(
        offered({"a": wrong, "n": DAYS}, {"n": DAYS}, required=["n"]), parallel=True, forced=forced
    )
    made = CallConstraintCache(HERMES, THINK, {}).constraint(tools, "content")

    def takes(name: str, arguments: Any) -> bool:
        call = json.dumps({"name": name, "arguments": arguments})
        return accepts(made, f"<tool_call>\n{call}\n</tool_call>")

    assert takes("f0", {"n": 1, "a": {"x": [1, "y"]}})
    assert takes("f0", {"n": 1, "a": "z"})
    assert not takes("f0", {"n": "one"})
    assert takes("f1", {"n": 1})
    assert not takes("f1", {"n": 1, "a": 1})


@pytest.mark.parametrize("wrong", WRONG, ids=json.dumps)
def test_a_strict_tool_is_not_loosened(wrong: Any) -> None:
    tools = Tools.from_request(offered({"a": wrong}, strict=True))
    with pytest.raises(RequestError):
        CallConstraintCache(HERMES, THINK, {}).constraint(tools, "content")


def test_parameters_that_are_no_schema_of_an_object_are_any_object() -> None:
    for form, text in (
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'),
        (QWEN, xml(THREE).replace("look_up", "f")),
    ):
        tools = Tools.from_request(
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "any"}}}]
        )
        made = CallConstraintCache(form, THINK, {}).constraint(tools, "content")
        assert accepts(made, text)


def test_tools_too_large_to_bind_are_served_unbound() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a" * 4000: deep}}
    tools = Tools.from_request(offered(*[deep] * 20))
    binder = CallConstraintCache(HERMES, THINK, {})
    made = binder.constraint(tools, "content")
    assert made is None or "aaa" not in made.grammar
    huge = [{"type": "function", "function": {"name": "n" * 3000 + str(n)}} for n in range(400)]
    assert binder.constraint(Tools.from_request(huge), "content") is None
    with pytest.raises(RequestError):
        binder.constraint(Tools.from_request(huge, forced=True), "content")


def test_a_call_within_reasoning_is_none_where_the_parser_takes_it_for_none() -> None:
    assert HERMES.constraint(tools(forced=False), HERMES.reasoning[0], "start").hidden is None
    for part, hidden in (
        ("start", ("[THINK]", "[/THINK]")),
        ("reasoning", ("", "[/THINK]")),
        ("content", None),
    ):
        assert HERMES.constraint(tools(forced=False), BRACKETS, part).hidden == hidden
