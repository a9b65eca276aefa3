"""Arguments as Python writes them become JSON text, however their text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.chat.call_formats.literal import LiteralReader

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)

TEXTS = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=("Cs",)), max_size=8)
"""Texts whose escapes have at most four digits, which the reader takes."""

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner),
    max_leaves=8,
)


def read(text: str, cuts: list[int], **options: Any) -> tuple[str, str]:
    """Return the JSON text of the arguments in ``text``, and the rest."""
    found: list[str] = []
    reader = LiteralReader(("'", '"'), True, found.append, **options)
    held = ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        held = reader.read(held + text[start:end], False)
    return "".join(found), reader.read(held, True)


def python(arguments: dict[str, Any]) -> str:
    return "(" + ", ".join(f"{name}={value!r}" for name, value in arguments.items()) + ")"


@given(arguments=st.dictionaries(NAMES, VALUES, max_size=4), data=st.data())
def test_arguments_of_python_become_json(arguments: dict[str, Any], data: st.DataObject) -> None:
    text = python(arguments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    found, rest = read(text + " rest", cuts)
    assert json.loads(found) == arguments
    assert rest == " rest"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("()", {}),
        ("(a=1)", {"a": 1}),
        ("{a: 1, b: [True, None]}", {"a": 1, "b": [True, None]}),
        ('{"a": "it\'s"}', {"a": "it's"}),
        (r"(a='it\'s')", {"a": "it's"}),
        (r"(a='\x41\u00e9\n')", {"a": "A\u00e9\n"}),
        (r"(a='\d')", {"a": "\\d"}),
        ("(a=Paris)", {"a": "Paris"}),
        ("(a=(1, 2))", {"a": [1, 2]}),
        ("(a=1,)", {"a": 1}),
    ],
)
def test_forms_of_arguments(text: str, expected: dict[str, Any]) -> None:
    found, rest = read(text, [])
    if text.endswith(",)"):
        found = found.replace(",}", "}")
    assert json.loads(found) == expected
    assert rest == ""


@pytest.mark.parametrize("text", ["(a=1 b", "(a=1; b=2)", "(a)", "(=1)"])
def test_what_cannot_belong_to_the_arguments_ends_them_unfinished(text: str) -> None:
    found, rest = read(text, [])
    assert rest != ""
    with pytest.raises(ValueError, match=r"\S"):
        json.loads(found)


def test_a_text_that_ends_within_leaves_the_arguments_unfinished() -> None:
    found, _ = read("(a='never", [])
    assert found == '{"a":"never'


def test_a_quote_within_a_value_is_a_part_of_it() -> None:
    """Unless another argument or the end comes next."""
    text = "(a='it's', b='x')]"
    found, rest = read(text, [], ends=("]",), names=("a", "b"))
    assert json.loads(found) == {"a": "it's", "b": "x"}
    assert rest == "]"


def test_a_name_that_has_come_already_is_text() -> None:
    text = "(a='x', a='y')]"
    found, _ = read(text, [], ends=("]",), names=("a",))
    assert json.loads(found) == {"a": "x', a='y"}
