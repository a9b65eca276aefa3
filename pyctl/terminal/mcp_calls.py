"""Tools in a chat at a terminal: their definitions for the model, and which of its calls run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pyctl.files.atomic_file import make_private, write_atomic
from pyctl.mcp import bounded
from pyctl.mcp.toolbox import ToolBox
from pyctl.settings.limit import limit
from pyctl.terminal.conversation import Call
from pyctl.text import error_text

__all__ = ["MAX_ROUNDS", "OfferedTool", "OwnTools", "ToolCalls", "ToolSource", "result_text"]

MAX_ROUNDS = limit(
    100,
    "replies with tool calls after one message of a chat at a terminal",
    "the user has to go on",
    "process",
)

REFUSED = "The user refused this call."
STOPPED = "The user stopped this call."
UNKNOWN = "There is no such tool."
UNREADABLE = "The arguments of this call are not a JSON object."

CHOICES = "[o]nce, [c]hat, [a]lways, [n]o"
"""Short, so that the question fits into one line; "y" counts as once."""

Ask = Callable[[str], str]
"""Asks the user a question in one line; "" if there is no terminal."""


@dataclass(frozen=True)
class OfferedTool:
    """A tool with its definition in OpenAI's form."""

    name: str
    reads_only: bool
    definition: Mapping[str, Any]


class ToolSource(Protocol):
    """A source that runs tools; ``origin`` distinguishes sources with tools of the same names."""

    origin: str

    def offered(self) -> Sequence[OfferedTool]:
        """Return the tools, in a stable order."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result, for the model. An exception becomes one."""


class OwnTools:
    """The tools of this process's MCP servers."""

    origin = "here"

    def __init__(self, box: ToolBox) -> None:
        self._box = box

    def offered(self) -> Sequence[OfferedTool]:
        return [OfferedTool(tool.name, tool.reads_only, tool.definition()) for tool in self._box]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return result_text(self._box.get(name).run(arguments))


def result_text(result: Mapping[str, Any]) -> str:
    """Return the text of a tool's result for the model."""
    plain = result.get("plain_text_response")
    return bounded(plain if isinstance(plain, str) else json.dumps(result, ensure_ascii=False))


class ToolCalls:
    """A runner of the calls that the user allows: once, for this chat, or always, which the file
    ``kept`` remembers.
    """

    def __init__(self, source: ToolSource | None, ask: Ask, kept: Path | None = None) -> None:
        self._source = source
        self._ask = ask
        self._kept = kept
        self._in_chat: set[str] = set()
        self.last = ""

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request for the tools."""
        offered = self._offered()
        return {"tools": [tool.definition for tool in offered]} if offered else {}

    def can_run(self, calls: Sequence[Call]) -> bool:
        """Return whether one of ``calls`` is of a tool that is offered."""
        names = {tool.name for tool in self._offered()}
        return any(call.name in names for call in calls)

    def result(self, call: Call) -> str:
        """Return the result of ``call``, or the reason why it has none."""
        tool = next((tool for tool in self._offered() if tool.name == call.name), None)
        arguments = _arguments(call)
        if tool is None or self._source is None:
            self.last = UNKNOWN
        elif arguments is None:
            self.last = UNREADABLE
        elif not self._is_allowed(tool, self._source.origin):
            self.last = REFUSED
        else:
            try:
                self.last = self._source.call(call.name, arguments)
            except (
                Exception
            ) as error:  # whatever a model's arguments lead to, the conversation goes on
                self.last = result_text({"error": error_text(error)})
        return self.last

    def _offered(self) -> Sequence[OfferedTool]:
        return () if self._source is None else self._source.offered()

    def _is_allowed(self, tool: OfferedTool, place: str) -> bool:
        key = f"{place} {tool.name}"
        always = self._always()
        if tool.name in self._in_chat or key in always:
            return True
        what = "reads only" if tool.reads_only else "can change things"
        answer = self._ask(f"run {tool.name} ({what})? {CHOICES}: ").strip().lower()[:1]
        if answer == "c":
            self._in_chat.add(tool.name)
        elif answer == "a" and self._kept is not None:
            make_private(self._kept.parent)
            write_atomic(self._kept, json.dumps(sorted({*always, key}), indent=1).encode())
        return answer in ("o", "y", "c", "a")

    def _always(self) -> set[str]:
        try:
            names = json.loads(self._kept.read_bytes()) if self._kept is not None else []
        except (OSError, ValueError, RecursionError):
            names = []
        return {key for key in names if isinstance(key, str)} if isinstance(names, list) else set()


def _arguments(call: Call) -> Mapping[str, Any] | None:
    """Return the arguments of ``call``; None if they are not a JSON object, as in a call that was
    cut off.
    """
    try:
        value = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
