"""Scanning of calls as they stream: the ends of values, heads of calls, and coerced arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.chat.call_formats.scan import (
    NeedMoreInput,
    ValueEnd,
    coerce_argument,
    from_python,
    joined,
    json_head,
    parse_json,
    skip_blanks,
    starts_with,
    string_at,
    tag_name,
    type_names,
    whole_call,
)
from pyctl.chat.reply import CallDelta

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=4)


@given(value=OBJECTS, rest=st.text(max_size=10), cuts=st.lists(st.integers(0, 60), max_size=4))
def test_the_end_of_a_value_is_found_however_its_text_grows(
    value: dict[str, Any], rest: str, cuts: list[int]
) -> None:
    text = json.dumps(value)
    whole = text + rest
    finder = ValueEnd()
    for cut in sorted(cuts):
        if cut < len(text):
            with pytest.raises(NeedMoreInput):
                finder.find(whole[:cut], 0)
    assert finder.find(whole, 0) == len(text)


def test_a_value_may_start_anywhere() -> None:
    assert ValueEnd().find('say {"a": [1]} now', 4) == 14


def test_brackets_and_quotes_within_strings_end_nothing() -> None:
    text = r'{"a": "}]\"}"}'
    assert ValueEnd().find(text + "}", 0) == len(text)


def test_a_value_beyond_the_bound_has_no_end() -> None:
    finder = ValueEnd(max_size=10)
    assert finder.find('{"a": "' + "x" * 20, 0) == -1
    assert finder.find("{}", 0) == 2, "the next value is looked for anew"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("<call>x", True), ("<cal", None), ("", None), ("<cat>", False), ("x", False)],
)
def test_a_tag_is_there_or_not_or_may_come(text: str, expected: bool | None) -> None:
    if expected is None:
        with pytest.raises(NeedMoreInput):
            starts_with("<call>", text, 0)
        return
    assert starts_with("<call>", text, 0) == expected


def test_blanks_are_skipped() -> None:
    assert skip_blanks("a \n\tb", 1) == 4
    assert skip_blanks("a  ", 1) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name>rest", ("name", 5)),
        ("a b>", ("", 0)),
        ("<x>", ("", 0)),
        (">", ("", 1)),
        ("x" * 257, ("", 0)),
    ],
)
def test_the_name_of_a_tag(text: str, expected: tuple[str, int]) -> None:
    assert tag_name(text, 0) == expected


def test_the_name_of_a_tag_may_still_come() -> None:
    with pytest.raises(NeedMoreInput):
        tag_name("nam", 0)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', "f"),
        ('{ "name" : "f" , "arguments" : {', "f"),
        ('{"id": "1", "name": "f", "arguments": {', "f"),
        ('{"arguments": {}, "name": "f"}', ""),
        ('{"name": "f", "arguments": "{}"}', ""),
        ('{"name": 1, "arguments": {}}', ""),
        ("[]", ""),
    ],
)
def test_the_head_of_a_call_as_json(text: str, name: str) -> None:
    found, pos = json_head(text, 0)
    assert found == name
    assert not name or text[pos] == "{"


@pytest.mark.parametrize("n", range(1, len('{"name": "f", "arguments": {')))
def test_the_beginning_of_a_head_needs_more(n: int) -> None:
    with pytest.raises(NeedMoreInput):
        json_head('{"name": "f", "arguments": {'[:n], 0)


def test_the_key_of_the_arguments_may_be_the_name() -> None:
    assert json_head('{"f": {"a": 1}}', 0, name_key="") == ("f", 6)


@given(st.text(min_size=1, max_size=200))
def test_a_string_is_read_as_json_writes_it(value: str) -> None:
    text = json.dumps(value)
    assert string_at(text + "x", 0) == (value, len(text))


@pytest.mark.parametrize("text", ["x", '""', r'"\q"', '"' + "x" * 257 + '"', '"' + "x" * 2000])
def test_other_strings_are_none(text: str) -> None:
    assert string_at(text, 0)[0] == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', ("f", '{"a": 1}')),
        ('{"name": "f", "parameters": {"a": 1}}', ("f", '{"a": 1}')),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', ("f", '{"a": 1}')),
        ('{"name": "f"}', ("f", "{}")),
        ('{"name": "f", "arguments": [1]}', ("", "")),
        ('{"name": 7}', ("", "")),
        ("[]", ("", "")),
        ("{", ("", "")),
    ],
)
def test_a_whole_call_has_its_members_in_any_order(text: str, expected: tuple[str, str]) -> None:
    assert whole_call(text) == expected


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("7", {"integer"}, "7"),
        ("7", {"string"}, '"7"'),
        ("7", {"string", "integer"}, "7"),
        (" True ", {"boolean"}, "true"),
        ("None", {"string", "null"}, "null"),
        ("[1, 'a']", {"array"}, '[1, "a"]'),
        ("7", {"string", "boolean"}, '"7"'),
        ("7", {"boolean"}, "7"),
        ("Paris", {"integer"}, '"Paris"'),
        ("NaN", {"number"}, '"NaN"'),
    ],
)
def test_an_argument_is_json_of_its_types_or_a_string(
    text: str, types: set[str], expected: str
) -> None:
    assert coerce_argument(text, types) == expected


@given(st.text(), st.sets(st.sampled_from(["string", "integer", "array", "boolean"]), min_size=1))
def test_any_argument_becomes_json(text: str, types: set[str]) -> None:
    json.loads(coerce_argument(text, types))


@given(VALUES)
def test_python_text_becomes_json(value: Any) -> None:
    assert parse_json(from_python(json.dumps(value))) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("'it\\'s'", '"it\'s"'),
        ("'say \"hi\"'", '"say \\"hi\\""'),
        ("{'a': True, 'b': None}", '{"a": true, "b": null}'),
        ('"True"', '"True"'),
        ("'open", "'open"),
    ],
)
def test_quotes_and_words_of_python(text: str, expected: str) -> None:
    assert from_python(text) == expected


@pytest.mark.parametrize("text", ["NaN", "Infinity", "{", "", "[" * 100_000])
def test_other_text_is_no_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_json(text)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (True, ("boolean",)),
        (1, ("integer", "number")),
        (1.5, ("number",)),
        ("a", ("string",)),
        ([], ("array",)),
        ({}, ("object",)),
        (None, ("null",)),
    ],
)
def test_types_of_values(value: Any, names: tuple[str, ...]) -> None:
    assert type_names(value) == names


def test_adjacent_pieces_of_arguments_are_joined() -> None:
    head = CallDelta(0, "a", "f")
    pieces = [head, CallDelta(0, arguments="{"), CallDelta(0, arguments="}")]
    other = [CallDelta(1, "b", "g"), CallDelta(1, arguments="{}")]
    assert joined([*pieces, *other]) == (head, CallDelta(0, arguments="{}"), *other)
    assert joined([]) == ()
