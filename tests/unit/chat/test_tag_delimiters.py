"""Calls that are a name and arguments between tags."""

from __future__ import annotations

import pytest

from pyctl.chat.call_formats.delimiters import CallHead
from pyctl.chat.call_formats.tag_delimiters import TagDelimiters
from pyctl.chat.tool_definitions import Tool, Tools
from tests.unit.chat.parsing import KEY_TAGS

NAMED = TagDelimiters(
    begin="<calls>\n",
    open="<f=",
    name_end=">\n",
    key_open="<p=",
    key_end=">\n",
    value_end="\n</p>\n",
    close="</f>\n",
    end="</calls>",
)


@pytest.mark.parametrize(
    ("delimiters", "text", "rest"),
    [
        (NAMED, "<f=g>\n<p=a>", "<p=a>"),
        (NAMED, "<f=g></f>", "</f>"),
        (KEY_TAGS, "<call>g<key>a", "<key>a"),
        (KEY_TAGS, "<call> g\n</call>", "</call>"),
    ],
)
def test_the_head_ends_at_the_first_tag(delimiters: TagDelimiters, text: str, rest: str) -> None:
    head = delimiters.head(text, 0)
    assert head.name == "g"
    assert text[head.pos :].strip() == rest


@pytest.mark.parametrize("text", ["g<key>a", "<call>g and more"])
def test_other_texts_are_no_call(text: str) -> None:
    assert KEY_TAGS.head(text, 0) == CallHead()


def test_an_ambiguous_opener_counts_only_with_the_name_of_a_tool() -> None:
    tools = Tools((Tool("g", {}), Tool("h", {})))
    assert list(NAMED.other_openers(tools)) == ["<f=g>", "<f=h>"]
    assert list(KEY_TAGS.other_openers(tools)) == []


def test_a_value_ends_before_one_of_three_tags() -> None:
    assert NAMED.after_value == ("<p=", "</f>", "</calls>")
    assert NAMED.has_lines
    assert not KEY_TAGS.has_lines
