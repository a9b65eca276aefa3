"""The messages of gpt-oss: reasoning, calls and content, each with a head."""

from __future__ import annotations

import pytest

from pyctl.chat.call_formats.message_format import HARMONY
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.template import Template
from tests.unit.chat.conftest import unpacked
from tests.unit.chat.families import HI, parse
from tests.unit.chat.parsing import Parsed
from tests.unit.chat.toy import ByteTokenizer, prepare


class TestHarmony:
    form = HARMONY

    @pytest.mark.parametrize(
        ("text", "parsed"),
        [
            ("<|channel|>final<|message|>Hi", ("", "Hi", [])),
            (
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
                ("hm", "Hi", []),
            ),
            (
                ' to=functions.stop<|channel|>commentary json<|message|>{"a": 1}<|call|>',
                ("", "", [("stop", '{"a": 1}')]),
            ),
            (
                "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
                "<|channel|>commentary<|message|>I look.<|end|>"
                "<|start|>assistant<|channel|>commentary to=functions.stop "
                "<|constrain|>json<|message|>{}<|call|>",
                ("a", "I look.", [("stop", "{}")]),
            ),
            (
                "<|channel|>commentary to=functions.stop<|message|><|call|>",
                ("", "", [("stop", "{}")]),
            ),
            ("<|channel|>commentary to=functions.stop<|message|>", ("", "", [("stop", "")])),
            ("<|message|>Hi", ("", "Hi", [])),
            ("Hi", ("", "Hi", [])),
            ("<|channel|>fin", ("", "<|channel|>fin", [])),
            ("<|channel|>" + "x" * 500, ("", "<|channel|>" + "x" * 500, [])),
            ("a<|end|><|start|>user<|message|>b", ("", "a<|start|>user<|message|>b", [])),
            (
                "<|channel|>commentary to=python<|message|>1",
                ("", "<|channel|>commentary to=python<|message|>1", []),
            ),
        ],
    )
    def test_replies(self, text: str, parsed: Parsed) -> None:
        assert parse(self.form, text) == parsed

    def test_without_tools_a_call_is_content_and_without_tags_reasoning_is(self) -> None:
        call = "<|channel|>commentary to=functions.stop<|message|>{}"
        assert parse(self.form, call, None) == ("", call, [])
        raw = self.form.parser(None, None, "start")
        text = (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
        )
        assert raw.feed(text).content + raw.finish().content == "<|channel|>analysis<|message|>hmHi"

    def test_what_is_continued_begins_in_its_part(self) -> None:
        assert parse(self.form, "on<|return|>", reply_part="content") == ("", "on", [])
        assert parse(
            self.form, "on<|end|><|start|>assistant<|message|>a", reply_part="reasoning"
        ) == ("on", "a", [])

    def test_reasoning_before_a_call_goes_back_into_the_prompt(self) -> None:
        """The analysis before a call is rendered in its own message, ahead of the call: the model
        was trained to continue from it after the result.
        """
        template = Template(unpacked("templates/openai-gpt-oss-120b.jinja").read_text())
        chat = ChatFormat(
            template, ByteTokenizer(("<|start|>", "<|end|>", "<|return|>"), eos="<|return|>")
        )
        call = {"type": "function", "function": {"name": "stop", "arguments": "{}"}}
        answer = {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [call],
        }
        text = prepare(
            chat, [HI, answer, {"role": "tool", "tool_call_id": "x", "content": "done"}]
        ).text
        assert (
            "<|start|>assistant<|channel|>analysis<|message|>hm<|end|><|start|>assistant "
            "to=functions.stop"
        ) in text
