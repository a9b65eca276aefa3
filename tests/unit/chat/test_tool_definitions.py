from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.chat.call_formats.scan import coerce_argument
from pyctl.chat.tool_definitions import ALL_TYPES, Tools, json_types, read_tools
from pyctl.errors import RequestError
from tests.effort import examples

ROOT: dict[str, Any] = {
    "$defs": {
        "word": {"type": "string"},
        "tree": {"anyOf": [{"type": "array"}, {"$ref": "#/$defs/tree"}]},
        "circle": {"$ref": "#/$defs/circle"},
        "a/b": {"type": "boolean"},
        "side": {"type": "string", "enum": ["left", "right"]},
        **{f"n{i}": {"anyOf": [{"$ref": f"#/$defs/n{i + 1}"}] * 2} for i in range(24)},
        "n24": {"type": "null"},
    }
}


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return schema


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"type": "integer"}, {"integer"}),
        ({"enum": ["a", 1, 1.5, True, None, [], {}]}, ALL_TYPES),
        ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"const": False}, {"boolean"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"type": "object"}, {"items": {}}]}, {"object", "array"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]}, {"null"}),
        (
            {"allOf": [{"type": "string"}, {"type": "null"}]},
            ALL_TYPES,
        ),  # nothing at all: do not be strict
        ({"$ref": "#/$defs/word"}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"$ref": "#/$defs/none", "type": "boolean"}, {"boolean"}),
        ({"$ref": "#/$defs/tree"}, {"array"}),
        ({"$ref": "#/$defs/circle"}, ALL_TYPES),
        ({"$ref": "#/$defs/none"}, ALL_TYPES),
        ({"$ref": "other.json"}, ALL_TYPES),
        ({"$ref": "#/$defs/n0"}, {"null"}),
        (deep(30), {"null"}),
        (deep(900), ALL_TYPES),
        ({"type": 3}, ALL_TYPES),
        ({"type": "nothing"}, ALL_TYPES),
        ({}, ALL_TYPES),
        (True, ALL_TYPES),
    ],
)
def test_types_of_a_schema(schema: Any, types: set[str]) -> None:
    assert json_types(schema, ROOT) == types


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "enum": ["a", "b"]}, ["a", "b"]),
        ({"type": "string", "const": "a"}, ["a"]),
        ({"$ref": "#/$defs/side"}, ["left", "right"]),
        ({"$ref": "#/$defs/side", "const": "left"}, ["left"]),
        ({"$ref": "#/$defs/circle"}, []),
        ({"$ref": "#/$defs/none"}, []),
        ({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, ["a", "b", None]),
        ({"oneOf": [{"const": "a"}, {"$ref": "#/$defs/side"}]}, ["a", "left", "right"]),
        ({"type": ["string", "null"], "enum": ["a", None]}, ["a", None]),
        ({"anyOf": [{"enum": ["a", "null"]}, {"type": "null"}]}, []),
        ({"anyOf": [{"enum": ["a"]}, {"type": "string"}]}, []),
        ({"anyOf": [{"type": "null"}]}, []),
        ({"anyOf": [{"$ref": "#/$defs/circle"}, {"enum": ["a"]}]}, []),
        ({"enum": ["a", 1]}, []),
        ({"const": 1}, []),
        ({"enum": "ab"}, []),
        ({"type": "string"}, []),
        (True, []),
    ],
)
def test_words_that_a_schema_lists(schema: Any, words: list[str | None]) -> None:
    function = {"name": "f", "parameters": {"properties": {"a": schema}, **ROOT}}
    assert (
        Tools.from_request([{"type": "function", "function": function}]).tools[0].words("a")
        == words
    )


def test_what_nobody_declared_may_be_anything() -> None:
    function = {
        "name": "f",
        "parameters": {"properties": {"a": {"type": "null"}}, "required": ["a", "b"]},
    }
    tools = Tools.from_request(
        [
            {"type": "function", "function": function},
            {"type": "function", "function": {"name": "g"}},
        ]
    )
    assert tools.types("f", "a") == {"null"}
    assert tools.types("f", "b") == tools.types("g", "a") == tools.types("h", "a") == ALL_TYPES
    assert tools.tools[0].required == ("a",)
    odd = {"name": "f", "parameters": {"properties": [], "required": "a"}}
    assert Tools.from_request([{"type": "function", "function": odd}]).tools[0].required == ()


def named(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


F_NESTED = {"type": "function", "function": {"name": "f"}}
F_FLAT = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("choice", "names", "forced"),
    [
        (None, "fg", False),
        ("auto", "fg", False),
        ("none", "", False),
        ("required", "fg", True),
        ("any", "fg", True),
        ({"type": "auto"}, "fg", False),
        ({"type": "none"}, "", False),
        ({"type": "required"}, "fg", True),
        (F_NESTED, "f", True),
        (F_FLAT, "f", True),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [F_NESTED]}},
            "f",
            False,
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [F_NESTED]}},
            "f",
            True,
        ),
        ({"type": "allowed_tools", "mode": "required", "tools": [F_FLAT, *named("g")]}, "fg", True),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "", False),
    ],
)
def test_only_chosen_tools_may_be_called_and_all_stay_in_prompt(
    choice: Any, names: str, forced: bool
) -> None:
    known, tools = read_tools(named("f", "g"), choice)
    assert [tool["function"]["name"] for tool in known or ()] == ["f", "g"]
    assert [tool.name for tool in tools.tools] == list(names) if tools is not None else not names
    assert tools is None or tools.forced is forced


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("maybe", "not 'maybe'"),
        (["auto"], "must be auto"),
        ({"type": "web_search"}, "not 'web_search'"),
        ({"type": "function"}, "a function that has a name"),
        (named("h")[0], "names 'h'"),
        ({"type": "allowed_tools"}, "must have a list"),
        ({"type": "allowed_tools", "allowed_tools": "x"}, "must have a list"),
        ({"type": "allowed_tools", "mode": "none", "tools": [F_FLAT]}, "'mode' auto or required"),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, "allows no tool"),
        ({"type": "allowed_tools", "mode": "auto", "tools": named("h")}, "names 'h'"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
            r"tools\[0\] must be",
        ),
    ],
)
def test_a_choice_that_means_nothing_is_refused(choice: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_tools(named("f", "g"), choice)


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_call_cannot_be_required_without_tools(tools: Any, choice: Any) -> None:
    with pytest.raises(RequestError, match="has no 'tools'"):
        read_tools(tools, choice)
    assert read_tools(tools, "auto")[1] is read_tools(tools, "none")[1] is None


def test_a_tool_has_a_name() -> None:
    with pytest.raises(RequestError, match=r"tools\[1\].function.name must not be empty"):
        read_tools(named("f", ""), "auto")


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("12", {"integer"}, 12),
        ("12", {"string"}, "12"),
        ("12", {"string", "integer"}, 12),
        ("12", {"string", "null"}, "12"),
        (" 1e3 ", {"number", "integer"}, 1000.0),
        ("1.0", {"integer"}, 1.0),
        ("twelve", {"integer"}, "twelve"),
        ("True", {"boolean"}, True),
        ("None", {"null", "string"}, None),
        ("True", {"string"}, "True"),
        ("{'a': [True, 'it\\'s \"x\"', \"None\"]}", {"object"}, {"a": [True, 'it\'s "x"', "None"]}),
        ("[1, 2", {"array"}, "[1, 2"),
        ("Infinity", {"number"}, "Infinity"),
        ("1" * 5000, {"integer"}, "1" * 5000),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("", {"object"}, ""),
    ],
)
def test_an_argument_by_its_types(text: str, types: set[str], value: Any) -> None:
    assert json.loads(coerce_argument(text, types)) == value


@settings(max_examples=examples(200))
@given(
    st.text(max_size=20)
    | st.lists(st.sampled_from("{}[]'\",:\\ TrueNone1a\n"), max_size=20).map("".join),
    st.sets(st.sampled_from(sorted(ALL_TYPES)), min_size=1),
)
def test_an_argument_is_always_json(text: str, types: set[str]) -> None:
    json.loads(coerce_argument(text, types))
