"""Calls as JSON between Qwen's tags, which Hermes began and most models with no better form were taught::

<tool_call>
{"name": "look_up", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

from pyctl.chat.call_formats.call_format import TaggedFormat, json_arguments
from pyctl.chat.call_formats.qwen import CLOSE, OPEN, QwenParser
from pyctl.chat.call_formats.scan import CallScanner
from pyctl.chat.constraint import GrammarBuilder
from pyctl.chat.reasoning import BRACKETS, SEED, THINK
from pyctl.chat.samples import SAMPLE_TOOL
from pyctl.chat.tools import Tool, Tools
from pyctl.text import random_id

__all__ = ["HermesFormat"]


class HermesFormat(TaggedFormat):
    """Also what is looked for where a template writes calls in no form that is known."""

    name = "Hermes (JSON between tags)"
    reasoning = (replace(THINK, interrupts=(OPEN,)), replace(SEED, forced_close=f"\n{SEED.close}"), BRACKETS)
    control_tokens = (OPEN, CLOSE)
    trigger = f"({OPEN})"
    _sample = re.compile(rf'{OPEN}\s*\{{"name": "{SAMPLE_TOOL}", "arguments": \{{')

    def call_parser(self, tools: Tools, new_id: Callable[[], str] = random_id) -> CallScanner:
        """Reads both of Qwen's forms."""
        return QwenParser(tools, new_id)

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """A call with arguments by the schema as a whole."""
        name = grammar.quoted(json.dumps(tool.name, ensure_ascii=False))
        middle = grammar.text(', "arguments": ')
        head, end = grammar.text(f'{OPEN}\n{{"name": '), grammar.text(f"}}\n{CLOSE}")
        return f"{head} {name} {middle} {json_arguments(grammar, tool)} {end}"
