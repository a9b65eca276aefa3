"""JSON schemas as grammars: the text of the rules. tests/model/llama/sampling/test_grammar.py tests
replies under them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.chat.constraint import GrammarBuilder, json_constraint
from pyctl.errors import RequestError
from tests.effort import examples
from tests.unit.chat.accepted import accepts


@pytest.mark.parametrize(
    "schema",
    [
        None,
        3,
        "string",
        False,
        {"type": "strange"},
        {"type": 7},
        {"type": [3]},
        {"$ref": "#/nowhere"},
        {"$ref": "https://example.com/schema"},
        {"$ref": 3},
        {"$ref": "#/a/9", "a": [1]},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"anyOf": []},
        {"oneOf": 3},
        {"allOf": [3, 4]},
        {"allOf": [{"enum": [1]}, {"enum": [2]}]},
        {"enum": []},
        {"properties": [], "type": "object"},
        {"properties": {"a": 1}},
        {"type": "object", "additionalProperties": 3},
        {"type": "array", "items": {"type": "integer"}, "minItems": -1},
        {"type": "array", "items": 3},
        {"type": "string", "maxLength": "4"},
        {"type": "string", "pattern": 3},
        {"type": "string", "pattern": "^(a"},
        {"type": "string", "pattern": "^a)$"},
        {"type": "string", "pattern": "^*$"},
        {"type": "string", "pattern": "^[a$"},
        {"type": "string", "pattern": "^[z-a]$"},
        {"type": "string", "pattern": "\\"},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "integer", "minimum": 10**400},
        {"type": "integer", "minimum": "1"},
        {"properties": {"a": {}}, "required": ["b"], "additionalProperties": False},
    ],
)
def test_what_cannot_be_converted_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError):
        json_constraint(schema)


def test_depth_is_bounded() -> None:
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"type": "array", "items": deep}
    with pytest.raises(RequestError, match="deep"):
        json_constraint(deep)


KEYWORDS = (
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "type",
    "const",
    "enum",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "exclusiveMaximum",
    "a",
)
WORDS = (
    "object",
    "array",
    "string",
    "integer",
    "number",
    "#",
    "#/a",
    "#/anyOf/0",
    "date",
    "uuid",
    "^a$",
    "a+|(b",
    "",
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 30)
    | st.floats()
    | st.sampled_from((*WORDS, 2**60, -(2**63), 1.0)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=5)
    ),
    max_leaves=12,
)


@settings(max_examples=examples(400))
@given(JSON)
def test_anything_is_converted_or_refused(schema: Any) -> None:
    with contextlib.suppress(RequestError):
        json_constraint(schema)


def said(value: Any, style: int = 0) -> str:
    """Return ``value`` as models write it: compact, with blanks, or over several lines."""
    if style == 0:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(value, ensure_ascii=False, indent=2 if style == 2 else None)


S = {"S": {"type": "string"}}
I = {"I": {"type": "integer", "maximum": 9}}  # noqa: E741
CLOSED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (True, [1, {"a": [None]}], []),
        ({"type": "value"}, [1, "x"], []),
        (CLOSED, [{"a": 1}], [{}, {"a": "x"}, {"a": 1, "b": 2}]),
        ({**CLOSED, "additionalProperties": True}, [{"a": 1, "b": 2}], [{"b": 2}]),
        (
            {**CLOSED, "additionalProperties": {"type": "null"}},
            [{"a": 1, "b": None}],
            [{"a": 1, "b": 2}],
        ),
        ({"type": "object", "required": ["a"]}, [{"a": 1}], [{}]),
        (
            {"properties": {"a": {}, "b": {}}, "required": ["b"]},
            [{"b": 1, "a": 1}, {"b": 1}],
            [{"a": 1, "b": 1}, 3],
        ),
        (
            {
                "type": "object",
                "patternProperties": {"^x": {"type": "null"}},
                "additionalProperties": False,
            },
            [{}, {"xy": None}],
            [{"xy": 1}, {"y": None}],
        ),
        (
            {
                "allOf": [
                    CLOSED,
                    {"properties": {"b": {"type": "null"}}, "additionalProperties": False},
                ]
            },
            [{"a": 1}, {"a": 1, "b": None}],
            [{"b": None}, {"a": 1, "c": 1}, {"a": 1, "b": 1}],
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/c"}],
                "properties": {"b": {"type": "null"}},
                "$defs": {"c": CLOSED},
            },
            [{"a": 1, "b": None}],
            [{"b": None}, {"a": 1, "c": 1}],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {}, "b": {}},
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            [{"a": 1}, {"b": 1}],
            [{}, {"c": 1}],
        ),
        ({"oneOf": [CLOSED, {"type": "integer"}]}, [{"a": 1}, 3], ["x", {"a": 1, "b": 1}]),
        ({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]}, [2, 3], [1, 4]),
        ({"type": ["string", "null"], "maxLength": 2}, ["ab", None], ["abc", 1]),
        (
            {"type": ["string", "null"], "anyOf": [{"maxLength": 2}, {"const": "long"}]},
            ["ab", "long"],
            ["abc"],
        ),
        (
            {"enum": ['a"b', "e\nf", "ü", 1, None, {"x": [1, "y"]}]},
            ['a"b', "e\nf", "ü", {"x": [1, "y"]}],
            ["x"],
        ),
        (
            {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}]},
            [[1, None]],
            [[1], [1, None, 1]],
        ),
        ({"type": "array", "items": [{"const": 1}]}, [[1]], [[], [1, 1]]),
        (
            {"items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
            [[1], [1, 2]],
            [[], [1, 2, 3], ["x"]],
        ),
        ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, [-3, 0, 11], [-4, 12, 100]),
        ({"type": "integer"}, [0, -(2**53) + 1, 2**53 - 1], [2**53, -(2**53), 10**17, 1.5, "1"]),
        (
            {"type": "integer", "minimum": 10**17, "maximum": 10**18},
            [10**17, 10**18],
            [1, 10**18 + 1],
        ),
        ({"type": "integer", "exclusiveMaximum": -(10**17)}, [-(10**17) - 1, -(10**18)], [0]),
        ({"type": "number", "minimum": 0.5, "maximum": 2}, [0.5, 1, 1.75], [0, 0.25, 2.5]),
        ({"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"}, ["AB-123"], ["AB-12", "xAB-123"]),
        ({"type": "string", "pattern": "b+"}, ["abbc"], ["ac"]),
        ({"type": "string", "pattern": "^a$|^b$"}, ["a", "b"], ["ab", "c"]),
        ({"type": "string", "pattern": '^["\\\\\\n]$'}, ['"', "\\", "\n"], ["a"]),
        ({"type": "string", "pattern": "^(?=a)b"}, ["anything"], [1]),
        ({"type": "string", "pattern": "^(a)\\1$"}, ["anything"], [1]),
        ({"type": "string", "format": "date"}, ["2026-01-31"], ["2026-13-01", "x"]),
        ({"type": "string", "format": "uuid4"}, ["123e4567-e89b-12d3-a456-426614174000"], ["x"]),
        ({"type": "string", "format": "nothing known"}, ["x"], []),
        ({"type": "object", "x-guidance": {"whitespace_flexible": False}}, [{"a": 1}], []),
        (
            {
                "$ref": "#/$defs/a~1b",
                "$defs": {"a/b": {"anyOf": [{"const": 1}, {"type": "boolean"}]}},
            },
            [1, True],
            [2],
        ),
        (
            {
                "$ref": "#/$defs/t",
                "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
            },
            [[[], [[]]]],
            [[1]],
        ),
        # A reference is a part of an address, and so percent-encoded.
        ({"$ref": "#/$defs/List%3CInt%3E", "$defs": {"List<Int>": {"const": 1}}}, [1], [2]),
        ({"$ref": "#/$defs/A%20B", "$defs": {"A B": {"const": 1}}}, [1], [2]),
        ({"$ref": "#/$defs/%C3%BC", "$defs": {"ü": {"const": 1}}}, [1], [2]),
        ({"$ref": "#/$defs/a%7E1b%2Fc", "$defs": {"a/b/c": {"const": 1}}}, [1], [2]),
        ({"$ref": "#/$defs/100%", "$defs": {"100%": {"const": 1}}}, [1], [2]),
        ({"$ref": "#/$defs/A%20B", "$defs": {"A%20B": {"const": 1}}}, [1], [2]),
        # What stands beside a reference holds as well.
        ({"$ref": "#/$defs/S", "enum": ["u", "v", 1], "$defs": S}, ["u", "v"], ["w", 1]),
        ({"$ref": "#/$defs/S", "const": "u", "$defs": S}, ["u"], ["v"]),
        ({"$ref": "#/$defs/S", "maxLength": 2, "title": "T", "$defs": S}, ["ab"], ["abc", 1]),
        ({"$ref": "#/$defs/I", "minimum": 3, "$defs": I}, [3, 9], [2, 10]),
        ({"$ref": "#/$defs/S", "description": "any", "default": "a", "$defs": S}, ["abc"], [1]),
        (
            {"$ref": "#/$defs/C", "properties": {"b": {"type": "null"}}, "$defs": {"C": CLOSED}},
            [{"a": 1}, {"a": 1, "b": None}],
            [{"b": None}, {"a": 1, "b": 1}, {"a": 1, "c": 1}],
        ),
        (
            {
                "properties": {"x": {"$ref": "#/$defs/S", "maxLength": 2}},
                "required": ["x"],
                "$defs": S,
            },
            [{"x": "ab"}],
            [{"x": "abc"}],
        ),
        (
            {"$ref": "#/$defs/S", "anyOf": [{"maxLength": 1}, {"const": "long"}], "$defs": S},
            ["a", "long"],
            ["ab"],
        ),
        (
            {
                "allOf": [
                    {"$ref": "#/$defs/C", "required": ["b"], "properties": {"b": {}}},
                    {"properties": {"d": {}}},
                ],
                "$defs": {"C": CLOSED},
            },
            [{"a": 1, "b": 1, "d": 1}],
            [{"a": 1}],
        ),
        # Rules that other rules used to hide.
        ({"type": "string", "enum": ["a", 1, None]}, ["a"], [1, None]),
        ({"type": "string", "enum": [1, 2]}, [1, 2], ["1", 3]),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, ["aaa"], ["aaaa"]),
        ({"type": "string", "format": "ipv4", "maxLength": 8}, ["1.1.1.1"], ["111.111.111.1"]),
        ({"type": "integer", "multipleOf": 5, "minimum": 7}, [10, 35], [5, 12]),
        ({"minimum": 3, "maximum": 5}, [4], [2, 6]),
        ({"properties": {"a": {}}, "required": ["a", "b"]}, [{"a": 1, "b": [2]}], [{"a": 1}]),
        (
            {"allOf": [{"properties": {"a": {}}}, {"required": ["b"]}]},
            [{"a": 1, "b": 2}],
            [{"a": 1}],
        ),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_a_schema_accepts(schema: Any, yes: list[Any], no: list[Any]) -> None:
    constraint = json_constraint(schema)
    for style in range(3):
        for value in yes:
            assert accepts(constraint, said(value, style)), said(value, style)
        for value in no:
            assert not accepts(constraint, said(value, style)), said(value, style)


def test_escapes() -> None:
    constraint = json_constraint({"type": "string"})
    for text in (r'"\u00fc\n\"\\\t"', r'"\u0001"', '"ü"', '"</think>"'):
        assert accepts(constraint, text), text
    for text in (r'"\x"', '"\n"', r'"\u00g0"', '"'):
        assert not accepts(constraint, text), text


def test_white_space_is_bounded() -> None:
    constraint = json_constraint(CLOSED)
    assert accepts(constraint, '{\n\n\t\t"a" : 1\n}')
    for text in ('{  "a":1}', '{"a":1} ', ' {"a":1}', '{\n\n\n"a":1}', '{"a":1' + "\n" * 3 + "}"):
        assert not accepts(constraint, text), text


def test_definitions_of_two_schemas_do_not_meet() -> None:
    grammar = GrammarBuilder()
    parts = [
        grammar.json(
            {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": kind}}}
        )
        for kind in ("string", "integer")
    ]
    constraint = grammar.constraint(f"{parts[0]} {grammar.text('|')} {parts[1]}")
    assert accepts(constraint, '["x"]|[1]')
    assert not accepts(constraint, '[1]|["x"]')


def test_text_of_a_client_is_no_control_token() -> None:
    grammar = GrammarBuilder({"<|im_start|>": 151644})
    meant = grammar.constraint(f"{grammar.text('a<|im_start|>b')}")
    assert accepts(meant, "a<|im_start|>b")
    assert not accepts(json_constraint({"type": "string"}), '"a<|im_start|>b"')
    plain = grammar.constraint(grammar.quoted("<|im_start|>"))
    assert not accepts(plain, "<|im_start|>")


def chain(n: int, step: Callable[[Any], Any], last: Any) -> dict[str, Any]:
    """Return definitions that lead from one to the next."""
    definitions = {f"d{i}": step({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{n}": last}}


def nested(n: int, step: Callable[[Any], Any]) -> Any:
    schema: Any = {}
    for _ in range(n):
        schema = step(schema)
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": list(range(100_000))},
        {"enum": [f"value {i}" for i in range(200_000)]},
        {"const": "x" * 1_000_000},
        {"type": "object", "properties": {"x" * 100_000: {}}},
        {"const": nested(400, lambda inner: [inner])},
        chain(10_000, lambda ref: ref, {}),
        chain(
            3_000, lambda ref: {"type": "array", "items": {"anyOf": [{"type": "null"}, ref]}}, {}
        ),
        chain(1_000, lambda ref: {"allOf": [{"type": "object", "properties": {"a": {}}}, ref]}, {}),
        nested(1_000, lambda inner: {"anyOf": [{"type": "null"}, inner]}),
        nested(90, lambda inner: {"type": "object", "properties": {"a": inner}}),
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}},
        },
        {"$ref": "#", "maxLength": 3},
        chain(1_000, lambda ref: {**ref, "maxLength": 3}, {"type": "string"}),
        chain(3_000, lambda ref: {"items": {**ref, "minItems": 1}}, {}),
        {
            "allOf": [{"anyOf": [{"required": [f"{i}.{j}"]} for i in range(10)]} for j in range(10)]
            + [{"properties": {f"{i}.{j}": {} for i in range(10) for j in range(10)}}]
        },
        {"oneOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(3_000)]},
        {"type": "object", "properties": {f"p{i}": {} for i in range(5_000)}},
        {"type": "object", "properties": {f"p{i}": {} for i in range(50_000)}, "required": ["p1"]},
        {"anyOf": [{"type": "object", "properties": {f"p{i}": {} for i in range(900)}}] * 50},
        {"type": "array", "minItems": 10**18},
        {"type": "string", "maxLength": 10**25},
        {"type": "number", "minimum": 1e300},
        {"type": "string", "pattern": "(" * 1000 + "a" + ")" * 1000},
        {"type": "string", "pattern": "|".join(f"w{i}" for i in range(50_000))},
        {"type": "string", "pattern": "^(\\p{L}{1000}){1000}(\\p{N}{1000}){1000}$" * 50},
        {"patternProperties": {f"^a{i}.*b{{1,50}}$": {} for i in range(300)}, "type": "object"},
        {
            "type": "object",
            "properties": {f"p{i}": {"type": "string", "format": "email"} for i in range(15_000)},
            "required": [f"p{i}" for i in range(15_000)],
        },
    ],
)
def test_a_hostile_schema_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError):
        json_constraint(schema)


@pytest.mark.parametrize(
    "pattern",
    [
        "^(((a{1,50}){1,50}){1,50}){1,50}$",
        "^(a*)*(b*)*((a|b)*)*$",
        "^a{1,100000}$",
        "^(.|\\n)*a.{200}$",
        "^(\\w{1,100}\\s){1,100}$",
        "^\\p{L}{1,1000}$",
    ],
)
def test_a_heavy_pattern_is_served_or_given_up(pattern: str) -> None:
    """Each of these blows up an automaton that is built beforehand; here only the part that a reply
    visits is.
    """
    constraint = json_constraint({"type": "string", "pattern": pattern})
    for text in ("a" * 1000, "ab cd " * 100):
        with contextlib.suppress(RequestError):
            accepts(constraint, f'"{text}"')


LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["one", "two", 3, '"']},
        {"type": "integer", "minimum": -20, "maximum": 1000},
        {"type": "integer"},
        {"type": "number"},
        {"type": "string"},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[a-f]{1,3}$"},
        {"type": "string", "format": "date"},
    ]
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "null": st.none(),
    "integer": st.integers(-20, 1000),
    "number": st.floats(-1e9, 1e9).map(lambda x: round(x, 3)),
}


def simple(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.text('ab"\\-\n', min_size=1, max_size=3), inner, max_size=3)
    return st.one_of(
        properties.map(
            lambda found: {"type": "object", "properties": found, "required": [*found][:1]}
        ),
        inner.map(lambda item: {"type": "array", "items": item, "maxItems": 2}),
        st.tuples(inner, inner).map(lambda parts: {"anyOf": [*parts]}),
    )


def instance(schema: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """Return a value that ``schema`` accepts, with the required properties first."""
    if "anyOf" in schema:
        return instance(draw(st.sampled_from(schema["anyOf"])), draw)
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]))
    if schema["type"] == "object":
        names = [
            name
            for name in schema["properties"]
            if name in schema["required"] or draw(st.booleans())
        ]
        return {name: instance(schema["properties"][name], draw) for name in names}
    if schema["type"] == "array":
        return [instance(schema["items"], draw) for _ in range(draw(st.integers(0, 2)))]
    if schema["type"] == "string":
        if "format" in schema:
            return draw(st.dates()).isoformat()
        if "pattern" in schema:
            return draw(st.text("abcdef", min_size=1, max_size=3))
        letters = st.characters(exclude_categories=("Cs", "Cc"))
        return draw(
            st.text(
                st.one_of(letters, st.sampled_from('\n\t"\\')), max_size=schema.get("maxLength", 20)
            )
        )
    return draw(VALUES[schema["type"]])


@settings(max_examples=examples(150))
@given(st.recursive(LEAVES, simple, max_leaves=6), st.data(), st.integers(0, 2))
def test_whatever_is_valid_may_be_said(schema: Any, data: st.DataObject, style: int) -> None:
    value = instance(schema, data.draw)
    jsonschema.validate(value, schema)
    assert accepts(json_constraint(schema), said(value, style)), said(value, style)
