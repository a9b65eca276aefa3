"""Numbers of schemas that a 64-bit float would change."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.chat.constraint import GrammarBuilder, json_constraint
from pyctl.chat.exact_numbers import _between
from pyctl.errors import RequestError
from tests.effort import examples
from tests.unit.chat.accepted import accepts

ID = 1234567890123456789
ROUNDED = int(float(ID))
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {"id": {"const": ID}, "n": {"type": "integer"}},
    "required": ["id"],
}
FIRST = {"prefixItems": [{"const": ID}, {"type": "string"}]}
TREE = {
    "$ref": "#/$defs/Tree",
    "$defs": {
        "Tree": {
            "type": "object",
            "properties": {
                "id": {"const": ID},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
            },
        }
    },
}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"const": ID}, [ID], [ROUNDED]),
        ({"const": 1.0}, ["1.0"], ["1"]),
        ({"const": 1e-7}, ["1e-07"], ["1"]),
        (
            {"enum": [18446744073709551615, 0.5, 1.0, "a"]},
            [18446744073709551615, 0.5, "1.0", '"a"'],
            [1, 1.5],
        ),
        (
            {"const": {"a": [ID, {}], "b": []}},
            [(f'{{"a": [{ID}, {{}}], "b": []}}')],
            [f'{{"a":[{ROUNDED},{{}}]}}'],
        ),
        ({"type": "integer", "minimum": 2**53 + 1}, [2**53 + 1, 2**64 - 1], [2**53, 10**20]),
        ({"type": "integer", "maximum": -ID}, [-ID, -(2**63)], [1 - ID, -(2**63) - 1]),
        ({"type": "integer", "minimum": ID, "maximum": ID}, [ID], [ID + 1, ROUNDED]),
        (
            {"type": "integer", "exclusiveMinimum": ID, "maximum": ID + 2},
            [ID + 1, ID + 2],
            [ID, ID + 3],
        ),
        (
            {"type": ["integer", "null"], "minimum": ID, "maximum": ID + 9},
            ["null", ID + 9],
            [ID + 10],
        ),
        (
            RECORD,
            [f'{{"id": {ID}}}', (f'{{\n  "id": {ID},\n  "n": 3\n}}')],
            ['{"n":3}', f'{{"id":{ID},"m":3}}'],
        ),
        (
            {**RECORD, "additionalProperties": True},
            [f'{{"id":{ID},"m":[3]}}'],
            [f'{{"id":{ID},"id":3}}'],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "string"}, "id": {"const": ID}}},
            ["{}", f'{{"id":{ID}}}', f'{{"a":"x","id":{ID}}}', '{"a":"x"}'],
            [f'{{"id":{ID},"a":"x"}}', f'{{,"id":{ID}}}'],
        ),
        (
            {"type": "object", "additionalProperties": {"const": ID}},
            ["{}", f'{{"x":{ID},"y":{ID}}}'],
            ['{"x":1}'],
        ),
        (
            {"type": "array", "items": {"const": ID}},
            ["[]", f"[{ID},{ID},{ID}]"],
            [f"[{ROUNDED}]", f"[,{ID}]"],
        ),
        ({"items": {"const": ID}, "minItems": 1}, [f"[{ID}]", f"[{ID}, {ID}]"], ["[]"]),
        ({"items": {"const": ID}, "maxItems": 2}, ["[]", f"[{ID}, {ID}]"], [f"[{ID},{ID},{ID}]"]),
        ({"items": {"const": ID}, "maxItems": 0}, ["[]"], [f"[{ID}]"]),
        (FIRST, [f'[{ID},"a"]'], [f"[{ID}]", f'[{ID},"a",1]']),
        (
            {**FIRST, "items": {"type": "integer"}, "minItems": 1},
            [f"[{ID}]", f'[{ID},"a",1,2]'],
            ["[]", f"[{ID},1]"],
        ),
        ({"anyOf": [{"const": ID}, {"type": "string"}]}, [ID, '"x"'], [ROUNDED]),
        ({"type": "integer", "anyOf": [{"const": ID}, {"type": "string"}]}, [ID], ['"x"']),
        ({"allOf": [RECORD]}, [f'{{"id":{ID}}}'], [f'{{"id":{ROUNDED}}}']),
        (
            TREE,
            [f'{{"id":{ID},"kids":[{{"id":{ID}}},{{}}]}}'],
            [f'{{"kids":[{{"id":{ROUNDED}}}]}}'],
        ),
    ],
)
def test_numbers_keep_their_digits(schema: dict[str, Any], yes: list[Any], no: list[Any]) -> None:
    constraint = json_constraint(schema)
    assert [text for text in map(str, yes) if not accepts(constraint, text)] == []
    assert [text for text in map(str, no) if accepts(constraint, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [RECORD, {"minProperties": 1, "properties": {"n": {"minimum": 3}}}]},
        {**RECORD, "patternProperties": {"^x": {"type": "string"}}},
        {"type": "integer", "minimum": ID, "multipleOf": 3},
        {"items": {"const": ID}, "minItems": 3, "maxItems": 2},
        {"type": "string", "anyOf": [{"const": ID}]},
    ],
)
def test_what_rules_cannot_express_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        json_constraint(schema)


def test_the_rules_are_bounded() -> None:
    """Many parts that lead to the same long definition, and definitions that lead from one to the
    next.
    """
    long = {"enum": [f"{number:04}" * 20 for number in range(1000)]}
    around = {
        f"p{number}": {
            "anyOf": [{"const": ID}, {"items": {"$ref": "#/$defs/long"}, "maxItems": number}]
        }
        for number in range(300)
    }
    with pytest.raises(RequestError, match="bytes"):
        json_constraint({"properties": around, "$defs": {"long": long}})
    chain = {f"d{number}": {"items": {"$ref": f"#/$defs/d{number + 1}"}} for number in range(290)}
    deep = {"$ref": "#/$defs/d0", "$defs": {**chain, "d290": {"const": ID}}}
    assert f'"{ID}"' in json_constraint(deep).grammar


LOW = st.integers(-(2**63), 2**64)


@given(LOW, LOW, st.data())
def test_ranges_of_integers(one: int, other: int, data: st.DataObject) -> None:
    low, high = sorted((one, other))
    number = data.draw(
        st.integers(low - 3, high + 3) | st.sampled_from([low - 1, low, high, high + 1])
    )
    assert bool(re.fullmatch(_between(low, high), str(number))) == (low <= number <= high)


NUMBERS = (
    st.integers(2**53 + 1, 2**64 - 1)
    | st.integers(-(2**63), -(2**53) - 1)
    | st.sampled_from([1.0, 1e200, 2e-9])
)


def pairs() -> st.SearchStrategy[tuple[dict[str, Any], Any]]:
    """Return schemas, and a value of each."""
    alone = NUMBERS.map(lambda number: ({"const": number}, number)) | st.text(
        'ab"\\\n', max_size=3
    ).map(lambda text: ({"enum": [text, 1.0]}, text))

    def around(
        inner: st.SearchStrategy[tuple[dict[str, Any], Any]],
    ) -> st.SearchStrategy[tuple[dict[str, Any], Any]]:
        """Return pairs of a schema and a value of it, one level deeper than those of ``inner``."""
        objects = st.dictionaries(
            st.text('xy"', min_size=1, max_size=2), inner, min_size=1, max_size=3
        )
        return (
            objects.map(
                lambda found: (
                    {
                        "properties": {key: schema for key, (schema, _) in found.items()},
                        "required": [*found],
                    },
                    {key: value for key, (_, value) in found.items()},
                )
            )
            | st.lists(inner, min_size=1, max_size=3).map(
                lambda found: (
                    {"prefixItems": [schema for schema, _ in found]},
                    [value for _, value in found],
                )
            )
            | inner.map(lambda pair: ({"items": pair[0]}, [pair[1], pair[1]]))
            | inner.map(lambda pair: ({"anyOf": [{"type": "null"}, pair[0]]}, pair[1]))
        )

    return st.recursive(alone, around, max_leaves=5)


@given(pairs(), st.sampled_from([None, 1]))
@settings(max_examples=examples(60))
def test_a_value_of_a_schema_is_accepted_to_the_digit(
    pair: tuple[dict[str, Any], Any], indent: int | None
) -> None:
    schema, value = pair
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    assert accepts(json_constraint(schema), text), (schema, text)


def test_arguments_of_tools_keep_their_digits() -> None:
    """Each argument may lead to definitions of the tool."""
    parameters = {"properties": {"id": {"$ref": "#/$defs/Id"}}, "$defs": {"Id": {"const": ID}}}
    grammar = GrammarBuilder()
    assert accepts(
        grammar.constraint(grammar.json({"$ref": "#/properties/id"}, parameters)), str(ID)
    )
