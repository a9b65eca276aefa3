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
from pyctl.chat.grammar import Grammar, literal
from pyctl.chat.reasoning import BRACKETS, SEED, THINK
from pyctl.chat.samples import SAMPLE_TOOL
from pyctl.chat.tools import Tool, Tools
from pyctl.text import random_id

__all__ = ["HermesFormat"]


class HermesFormat(TaggedFormat):
    """Also what is looked for where a template writes calls in no form that is known."""

    reasoning = (replace(THINK, interrupts=(OPEN,)), replace(SEED, forced_close=f"\n{SEED.close}"), BRACKETS)
    trigger = f"({OPEN})"
    _sample = re.compile(rf'{OPEN}\s*\{{"name": "{SAMPLE_TOOL}", "arguments": \{{')

    def call_parser(self, tools: Tools, new_id: Callable[[], str] = random_id) -> CallScanner:
        """Reads both of Qwen's forms."""
        return QwenParser(tools, new_id)

    def call_rule(self, grammar: Grammar, tool: Tool, name: str) -> str:
        """A call with arguments by the schema as a whole."""
        head = literal(f'{OPEN}\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
        end = literal(f"}}\n{CLOSE}")
        return grammar.add(name, f"{head} {json_arguments(grammar, tool, name)} {end}")
