"""Delimiters of calls: where a call starts, its head, and the grammar that binds it."""

from __future__ import annotations

import re

import pytest

from pyctl.chat.call_formats.delimiters import CallHead, token_texts
from pyctl.chat.call_formats.name_delimiters import NameDelimiters
from pyctl.chat.call_formats.object_delimiters import ObjectDelimiters
from pyctl.chat.call_formats.scan import NeedMoreInput
from pyctl.chat.constraint import GrammarBuilder
from pyctl.chat.tool_definitions import Tool, Tools
from tests.unit.chat.accepted import accepts

OBJECTS = ObjectDelimiters(open="<call>", close="</call>")
LISTS = ObjectDelimiters(begin="[CALLS]", end="[/CALLS]", brackets=("[", "]"), between=", ")
NAMES = NameDelimiters(open="[CALL]", parts=(None, "[ID]", re.compile("[0-9]+"), "[ARGS]"))

STOP = Tool("stop", {"type": "object", "properties": {}})
TOOLS = Tools((STOP,))


def test_the_texts_that_may_be_tokens_are_in_angles_or_capitals() -> None:
    assert list(token_texts("\n<call>x [ARGS] y")) == ["<call>x [ARGS] y", "<call>", "[ARGS]"]
    assert list(token_texts(" \n")) == []


def test_all_delimiters_may_be_tokens() -> None:
    assert set(OBJECTS.all_tokens) >= {"<call>", "</call>"}
    assert set(LISTS.all_tokens) >= {"[CALLS]", "[/CALLS]"}


@pytest.mark.parametrize(
    ("delimiters", "opener"), [(OBJECTS, "<call>"), (LISTS, "[CALLS]"), (NAMES, "[CALL]")]
)
def test_calls_start_with_the_first_delimiter(
    delimiters: ObjectDelimiters | NameDelimiters, opener: str
) -> None:
    assert delimiters.opener == opener


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("[CALLS][{", 8),
        ("[CALLS] \n[ {", 11),
        ("[CALLS]{", -1),
        ("{", 0),
    ],
)
def test_the_first_call_follows_the_bracket_of_the_row(text: str, first: int) -> None:
    assert LISTS.first(text) == first


def test_the_bracket_may_still_come() -> None:
    with pytest.raises(NeedMoreInput):
        LISTS.first("[CALLS] ")


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ('<call>{"name": "stop", "arguments": {}}', CallHead("stop", "", 36)),
        ('{"name": "stop", "arguments": {}}', CallHead("stop", "", 30)),
        ('<call>{"stop": 1}', CallHead()),
        ("<call>stop", CallHead()),
    ],
)
def test_the_head_of_an_object(text: str, head: CallHead) -> None:
    found = OBJECTS.head(text, 0)
    assert found.name == head.name
    assert not head.name or found.pos == head.pos


def test_the_name_may_be_the_key_of_the_arguments() -> None:
    delimiters = ObjectDelimiters(open="<call>", close="</call>", name_key="")
    assert delimiters.head('<call>{"stop": {}}', 0) == CallHead("stop", "", 15)


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("[CALL]stop[ID]7[ARGS]{}", CallHead("stop", "", 21)),
        ("[CALL]stop[ID]7{}", CallHead("stop", "", 15)),
        ("[CALL]two words[ARGS]{}", CallHead()),
        ("stop{}", CallHead()),
    ],
)
def test_the_head_of_a_name(text: str, head: CallHead) -> None:
    assert NAMES.head(text, 0) == head


@pytest.mark.parametrize("text", ["", "[CA", "[CALL]", "[CALL]sto", "[CALL]stop[ID]"])
def test_a_head_may_still_come(text: str) -> None:
    with pytest.raises(NeedMoreInput):
        NAMES.head(text, 0)


def test_a_sentence_is_no_head() -> None:
    assert NAMES.head("[CALL]this is a sentence", 0) == CallHead()


@pytest.mark.parametrize("ids", ["", "pattern"])
def test_a_call_has_its_own_id_where_the_format_has_ids(ids: str) -> None:
    delimiters = NameDelimiters(open="[CALL]", parts=NAMES.parts, ids=ids)  # type: ignore[arg-type]
    assert delimiters.head("[CALL]stop[ID]7[ARGS]{}", 0).call_id == ("7" if ids else "")


def bound(delimiters: ObjectDelimiters | NameDelimiters, text: str, *, parallel: bool) -> bool:
    """Return whether the grammar of calls takes ``text``."""
    grammar = GrammarBuilder()
    calls = delimiters.calls(grammar, delimiters.call(grammar, STOP), parallel)
    return accepts(grammar.constraint(calls), text)


@pytest.mark.parametrize("parallel", [False, True])
def test_the_grammar_takes_one_call_or_several(parallel: bool) -> None:
    one = '\n<call>{"name": "stop", "arguments": {}}</call>'
    assert bound(OBJECTS, one, parallel=parallel)
    assert bound(OBJECTS, one + one, parallel=parallel) == parallel
    assert not bound(OBJECTS, one.replace("stop", "go"), parallel=parallel)


def test_calls_in_a_row_are_parted_and_closed_together() -> None:
    one = '{"name": "stop", "arguments": {}}'
    assert bound(LISTS, f"\n[CALLS][{one}, {one}][/CALLS]", parallel=True)
    assert not bound(LISTS, f"\n[CALLS][{one}{one}][/CALLS]", parallel=True)
