from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.errors import RequestError
from pyctl.server.api.custom_tool import InputReader, arguments_of, function_of


def read(arguments: str, cuts: list[int]) -> tuple[str, str]:
    """What a reader says of pieces, and then in the end."""
    reader, places = InputReader(), sorted({min(cut, len(arguments)) for cut in cuts})
    said = [reader.feed(arguments[a:b]) for a, b in zip([0, *places], [*places, len(arguments)], strict=True)]
    return "".join(said), reader.finish()


@given(st.text(), st.lists(st.integers(0, 200)), st.booleans())
def test_the_input_comes_back_however_its_arguments_are_cut(text: str, cuts: list[int], is_ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    assert read(arguments, cuts) == (text, "")
    assert read(arguments_of(text), cuts) == (text, "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "ab\\u00', ("ab", "")),
        ('{"input": "a\\ud83d', ("a", "")),
        ('{"input": "a\\ud83dx\\ude00"}', ("a", "\ufffdx\ufffd")),
        ('{"input": "a\\qb"}', ("a\\qb", "")),
        ('{"input": "a\nb"}', ("a\nb", "")),
        (' { "input" : "a" , "x": 1}', ("a", "")),
        ('{"x": 1, "input": "a"}', ("", "a")),
        ('{"patch": "a"}', ("", '{"patch": "a"}')),
        ('{"input": 7}', ("", '{"input": 7}')),
        ("[" * 5000, ("", "[" * 5000)),
        ("", ("", "")),
    ],
)
def test_arguments_that_no_grammar_bound_lose_nothing(arguments: str, expected: tuple[str, str]) -> None:
    assert read(arguments, []) == expected
    said, rest = read(arguments, list(range(len(arguments))))
    assert said + rest == "".join(expected)


def test_a_custom_tool_is_a_function_with_one_string() -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
    for given_form in (None, {"type": "text"}, form):
        function = function_of("n", {"description": "Counts.", "format": given_form}, "tools[0]")["function"]
        bound = {"pattern": "^(?:[0-9]+)$"} if given_form is form else {}
        assert function["parameters"]["properties"] == {"input": {"type": "string", **bound}}
        assert function["strict"] == bool(bound)
        assert ("[0-9]+" in function["description"]) == bool(bound)
        assert function["description"].startswith("Counts.")


@pytest.mark.parametrize(
    "form", [7, {"type": "gbnf"}, {"type": "grammar"}, {"type": "grammar", "syntax": "lark", "definition": "x"}]
)
def test_a_format_that_cannot_be_kept_to_is_refused(form: Any) -> None:
    with pytest.raises(RequestError, match=r"tools\[0\].format"):
        function_of("n", {"format": form}, "tools[0]")
