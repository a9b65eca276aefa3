"""Calls that are a name and arguments as literals."""

from __future__ import annotations

import pytest

from pyctl.chat.call_formats.delimiters import CallHead
from pyctl.chat.call_formats.literal_delimiters import LiteralDelimiters
from pyctl.chat.call_formats.scan import NeedMoreInput

PYTHON = LiteralDelimiters(begin="[", end="]", between=", ", round=True, separator="=")
BRACES = LiteralDelimiters(open="call:", quotes=("<q>",))


@pytest.mark.parametrize(
    ("delimiters", "text", "name"),
    [
        (PYTHON, "f(a=1)", "f"),
        (PYTHON, "f{a:1}", ""),
        (BRACES, "call:f{a:1}", "f"),
        (BRACES, "call: f(a=1)", ""),
    ],
)
def test_the_bracket_makes_the_name_a_call(
    delimiters: LiteralDelimiters, text: str, name: str
) -> None:
    assert delimiters.head(text, 0).name == name


def test_a_text_without_the_opener_is_no_call() -> None:
    assert BRACES.head("f{a:1}", 0) == CallHead()


@pytest.mark.parametrize("text", ["", "look_up"])
def test_a_name_that_is_not_whole_needs_more(text: str) -> None:
    with pytest.raises(NeedMoreInput):
        PYTHON.head(text, 0)


def test_strings_between_tags_have_no_escapes() -> None:
    assert PYTHON.has_escapes
    assert not BRACES.has_escapes


def test_only_round_brackets_are_followed_by_certain_texts() -> None:
    assert PYTHON.after_arguments == (",", "]")
    assert BRACES.after_arguments == ()
