"""Calls that are a name and its arguments as JSON."""

from __future__ import annotations

import re

import pytest

from pyctl.chat.call_formats.delimiters import CallHead
from pyctl.chat.call_formats.name_delimiters import NameDelimiters
from pyctl.chat.call_formats.scan import NeedMoreInput
from pyctl.chat.tool_definitions import Tools

PLAIN = NameDelimiters(begin="<calls>", open="<call>", parts=(None, "<sep>"))
WITH_ID = NameDelimiters(
    open="<call>", parts=(None, ("[ID]", re.compile(r"[a-z]{2}")), "[ARGS]"), ids="pattern"
)


@pytest.mark.parametrize(
    ("delimiters", "text", "name", "call_id"),
    [
        (PLAIN, "<call>f<sep>{}", "f", ""),
        (PLAIN, "<call> a.b <sep>\n{}", "a.b", ""),
        (PLAIN, "<call>f{}", "f", ""),
        (WITH_ID, "<call>f[ID]xy[ARGS]{}", "f", "xy"),
        (WITH_ID, "<call>f[ID]12[ARGS]{}", "f", ""),
        (WITH_ID, "<call>f[ARGS]{}", "f", ""),
    ],
)
def test_the_head_of_a_call(delimiters: NameDelimiters, text: str, name: str, call_id: str) -> None:
    assert delimiters.head(text, 0) == CallHead(name, call_id, text.index("{"))


@pytest.mark.parametrize("text", ["f<sep>{}", "<call>this is a sentence", "<call>two words{}"])
def test_other_texts_are_no_call(text: str) -> None:
    assert PLAIN.head(text, 0) == CallHead()


def test_a_head_that_is_not_whole_needs_more() -> None:
    with pytest.raises(NeedMoreInput):
        PLAIN.head("<call>f<se", 0)


def test_a_single_call_may_start_without_the_text_around_all() -> None:
    assert PLAIN.other_openers(Tools(())) == ("<call>",)
    assert WITH_ID.other_openers(Tools(())) == ()
