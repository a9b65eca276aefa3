"""Calls that are JSON objects."""

from __future__ import annotations

import pytest

from pyctl.chat.call_formats.delimiters import CallHead
from pyctl.chat.call_formats.object_delimiters import ObjectDelimiters
from pyctl.chat.call_formats.scan import NeedMoreInput

DELIMITERS = ObjectDelimiters(open="<call>\n", close="\n</call>")


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('<call>\n{"name": "f", "arguments": {"a": 1}}', "f", '{"a": 1}}'),
        ('<call> {"id": "1", "name": "f", "arguments": {}}', "f", "{}}"),
        ('{"name": "f", "arguments": {}}', "f", "{}}"),
    ],
)
def test_the_head_of_a_call_ends_where_its_arguments_start(
    text: str, name: str, arguments: str
) -> None:
    head = DELIMITERS.head(text, 0)
    assert head.name == name
    assert text[head.pos :].strip() == arguments


@pytest.mark.parametrize("text", ['<call>\n{"name": "f', '<call>\n{"name": "f", "argu'])
def test_a_head_that_is_not_whole_needs_more(text: str) -> None:
    with pytest.raises(NeedMoreInput):
        DELIMITERS.head(text, 0)


def test_a_text_is_no_call() -> None:
    assert DELIMITERS.head("<call>\nf(1)", 0).name == CallHead().name
