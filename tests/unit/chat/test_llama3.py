"""Llama 3's calls: JSON that is the whole message."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.chat.call_formats.llama3 import LlamaFormat
from tests.unit.chat.families import LLAMA_CALL, calls_of, parse
from tests.unit.chat.parsing import TOOLS


class TestLlama:
    form = LlamaFormat()

    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            (
                '\n{"name": "look_up", "parameters": {"text": "}"}}',
                "",
                [("look_up", {"text": "}"})],
            ),
            ('{"type": "function", "name": "stop", "parameters": {}}', "", [("stop", {})]),
            ('{"name": "stop", "arguments": {"a": 1}}', "", [("stop", {"a": 1})]),
            ('<|python_tag|>{"name": "stop", "parameters": {}}', "", [("stop", {})]),
            (f"{LLAMA_CALL}; {LLAMA_CALL}\n{LLAMA_CALL}", "", [("stop", {})] * 3),
            # content: an unknown function, JSON that is an answer, a call in the middle of a
            # sentence
            ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
            ('{"answer": 42}', '{"answer": 42}', []),
            (f"I say {LLAMA_CALL}", f"I say {LLAMA_CALL}", []),
            ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ],
    )
    def test_replies(self, text: str, content: str, calls: list[Any]) -> None:
        parsed = parse(self.form, text)
        assert parsed[1] == content
        assert calls_of(parsed) == calls

    def test_json_that_is_no_call_is_not_held_back_for_long(self) -> None:
        parser = self.form.call_parser(TOOLS)
        assert parser.feed('{"an').content == '{"an'
        text = '{"type": "' + "x" * 10_000
        held = self.form.call_parser(TOOLS)
        assert len("".join(held.feed(piece).content for piece in text)) > 5_000

    def test_arguments_come_out_as_they_stream(self) -> None:
        parser = self.form.call_parser(TOOLS)
        parser.feed('{"name": "look_up", "parameters": {"text": "a')
        assert [call.arguments for call in parser.feed("bc").calls] == ["bc"]
