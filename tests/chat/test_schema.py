"""JSON schemas as grammars: the text of the rules. What a model does under them is in engine/llama/test_grammar.py."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.chat.grammar import Grammar
from pyctl.chat.schema import SchemaRules, schema_grammar
from pyctl.errors import RequestError


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
    ],
)
def test_what_cannot_be_converted_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError):
        schema_grammar(schema)


def test_depth_is_bounded() -> None:
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"type": "array", "items": deep}
    with pytest.raises(RequestError, match="deep"):
        schema_grammar(deep)


def test_two_schemas_live_in_one_grammar() -> None:
    grammar = Grammar()
    names = []
    for kind in ("string", "integer"):
        schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": kind}}}
        names.append(SchemaRules(grammar, schema).rule("call"))
    grammar.add("root", " | ".join(names))
    rules = dict(line.split(" ::= ", 1) for line in grammar.text().splitlines())
    assert len(set(names)) == 2
    assert [rules["ref-defs-a"], rules["ref-defs-a-1"]] == ["json-string", "json-integer"]


def test_a_name_stands_for_one_body() -> None:
    grammar = Grammar()
    assert grammar.add("a b", '"x"') == "a-b"
    assert grammar.add("a-b", '"x"') == "a-b"
    assert grammar.add("a-b", '"y"') == "a-b-1"
    assert grammar.text() == 'a-b ::= "x"\na-b-1 ::= "y"\n'


KEYWORDS = (
    "$ref", "allOf", "anyOf", "oneOf", "type", "const", "enum", "properties", "required", "additionalProperties",
    "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum",
    "exclusiveMaximum", "a",
)  # fmt: skip
WORDS = ("object", "array", "string", "integer", "number", "#", "#/a", "#/anyOf/0", "date", "uuid", "^a$", "a+|(b", "")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 30) | st.floats() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(JSON)
def test_anything_is_converted_or_refused(schema: Any) -> None:
    with contextlib.suppress(RequestError):
        assert "root ::= " in schema_grammar(schema)
