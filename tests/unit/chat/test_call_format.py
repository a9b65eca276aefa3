"""The common parts of all call formats: tags, parsers in a chain, and constraints."""

from __future__ import annotations

import pytest

from pyctl.chat.call_formats.call_format import CallFormat, Chain, json_arguments
from pyctl.chat.call_formats.families import FAMILIES, HERMES, QWEN
from pyctl.chat.constraint import GrammarBuilder
from pyctl.chat.reply import THINK, ReasoningSplitter, ReasoningTags, ReplyDelta
from pyctl.chat.tool_definitions import Tool, Tools
from tests.unit.chat.accepted import accepts
from tests.unit.chat.families import HERMES_CALL, QWEN_CALL
from tests.unit.chat.parsing import LOOK_UP, STOP_TOOL, TOOLS

STOP = Tools.from_request([{"type": "function", "function": STOP_TOOL}])


def test_the_tags_are_those_that_the_template_has() -> None:
    assert HERMES.tags("x <seed:think> y").open == "<seed:think>"
    assert HERMES.tags("x <think> y").open == "<think>"


def test_a_template_without_tags_gets_the_preferred_ones_as_unknown() -> None:
    tags = HERMES.tags("nothing")
    assert tags.open == HERMES.reasoning[0].open
    assert not tags.is_known


@pytest.mark.parametrize("sample", ["nothing", "<tool_call>\n<function=other>", ""])
def test_a_sample_without_the_call_is_not_recognized(sample: str) -> None:
    assert not QWEN.recognizes(sample)


def test_reasoning_is_split_off_before_calls_are_looked_for() -> None:
    chain = Chain(ReasoningSplitter(THINK), HERMES.call_parser(STOP))
    text = f"<think>{HERMES_CALL}</think>So: {HERMES_CALL}"
    deltas = [*map(chain.feed, text), chain.finish()]
    assert "".join(delta.reasoning for delta in deltas) == HERMES_CALL
    assert "".join(delta.content for delta in deltas) == "So: "
    assert [call.name for delta in deltas for call in delta.calls if call.name] == ["stop"]


def test_without_tools_calls_stay_in_the_content() -> None:
    parser = QWEN.parser(None, None, "start")
    assert parser.feed(QWEN_CALL) == ReplyDelta(content=QWEN_CALL)


@pytest.mark.parametrize("form", FAMILIES, ids=lambda form: form.name)
def test_a_call_that_need_not_come_is_bound_from_its_trigger_on(form: CallFormat) -> None:
    constraint = form.constraint(TOOLS, form.reasoning[0], "start")
    assert constraint.triggers == (form.trigger,)


@pytest.mark.parametrize("form", FAMILIES, ids=lambda form: form.name)
def test_a_forced_call_binds_the_whole_reply(form: CallFormat) -> None:
    forced = Tools.from_request([LOOK_UP], forced=True)
    constraint = form.constraint(forced, form.reasoning[0], "start")
    assert constraint.triggers == ()
    assert constraint.hidden is None


def test_what_the_reasoning_says_starts_no_call() -> None:
    tags = ReasoningTags("<think>", "</think>")
    at_start = HERMES.constraint(TOOLS, tags, "start")
    assert at_start.hidden == ("<think>", "</think>")
    assert HERMES.constraint(TOOLS, tags, "reasoning").hidden == ("", "</think>")
    assert HERMES.constraint(TOOLS, tags, "content").hidden is None
    interrupted = ReasoningTags("<think>", "</think>", interrupts=("<tool_call>",))
    assert HERMES.constraint(TOOLS, interrupted, "start").hidden is None


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [('{"n": 7}', True), ('{"n": "7"}', False), ("{}", False), ("[7]", False)],
)
def test_the_arguments_of_a_tool_are_an_object_by_its_schema(text: str, is_accepted: bool) -> None:
    grammar = GrammarBuilder()
    tool = Tool("f", {"properties": {"n": {"type": "integer"}}, "required": ["n"]})
    constraint = grammar.constraint(json_arguments(grammar, tool))
    assert accepts(constraint, text) == is_accepted
