"""The tools of a conversation in Anthropic's form, as its system messages add and remove them.

A change leaves the head of the prompt as it is: the template shows the tools of the request, and a
text in the place of the change adds or withdraws one. The reply may call the tools that are offered
at its end. A request without tools has not shown the form of calls, so added tools go to its head.

A tool with ``defer_loading`` is not in the head either: its definition stands in the first result
that refers to it. Clients add it to ``tools`` when their search has found it, so that a head with
all tools would change in the middle of a conversation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyctl.errors import NotSupportedError, RequestError
from pyctl.requests.body_reader import Body, json_object
from pyctl.server.http import encode

__all__ = ["OfferedTools", "read_tool"]


class _Tool(Body, frozen=True):
    type: str = "custom"
    name: str = ""
    description: str = ""
    input_schema: Any = None
    defer_loading: bool = False


class _ChangedTool(Body, frozen=True):
    """The ``tool`` of a change: a tool of the request by name, or another by its definition."""

    type: Any = None
    name: str = ""
    definition: Any = None


def read_tool(value: Any, where: str) -> dict[str, Any]:
    """Return a tool as a function of a chat completion.

    Raises RequestError, and NotSupportedError for tools that only Anthropic has.
    """
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be an object")
    tool = _Tool.from_json(value)
    if tool.type != "custom" and tool.input_schema is None:
        raise NotSupportedError(
            f"{where}: tools of type {tool.type[:80]!r} are not supported: describe it by an "
            "'input_schema'"
        )
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema or {},
    }
    return {"type": "function", "function": function}


def _is_deferred(tool: dict[str, Any]) -> bool:
    return _Tool.from_json(tool).defer_loading


class OfferedTools:
    """The tools that a conversation offers, from its head to its end.

    Attributes:
        is_changed: Whether a message has added or removed a tool, or referred to a deferred one.
    """

    def __init__(self, declared: Iterable[Any] = ()) -> None:
        """Offer the ``declared`` tools of a request, but for deferred ones. Raises RequestError."""
        self._declared: list[dict[str, Any]] = []
        self._deferred: dict[str, dict[str, Any]] = {}
        for index, tool in enumerate(declared):
            function = read_tool(tool, f"tools[{index}]")
            if _is_deferred(tool):
                self._deferred[_name(function)] = function
            else:
                self._declared.append(function)
        if not self._declared:
            # The template shows the form of calls with its tools.
            self._declared = list(self._deferred.values())
            self._deferred = {}
        self.is_changed = False
        self._offered = {_name(tool): tool for tool in self._declared}
        self._known = {**self._deferred, **self._offered}

    @property
    def head(self) -> list[dict[str, Any]]:
        """The tools that the template shows."""
        return self._declared or list(self._known.values())

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that the reply may call."""
        return list(self._offered.values())

    def change(self, kind: str, tool: Any, where: str) -> str:
        """Apply a ``tool_addition`` or ``tool_removal`` of ``tool``; return the text for the model.

        Raises RequestError for a tool that is not known, and NotSupportedError for one of an MCP
        server.
        """
        self.is_changed = True
        changed = _ChangedTool.from_json(json_object(tool, f"{where}.tool"))
        if changed.type == "tool_definition" and kind == "tool_addition":
            return self._define(changed.definition, f"{where}.tool.definition")
        if changed.type != "tool_reference":
            raise NotSupportedError(
                f"{where}: tools of type {str(changed.type)[:80]!r} cannot be added or removed here"
            )
        name = changed.name
        if name not in self._known:
            raise RequestError(f"{where} names {name[:80]!r}, which is not among the tools")
        if kind == "tool_removal":
            self._offered.pop(name, None)
            return f"The tool {name} is no longer available."
        tool = self._known[name]
        self._offered[name] = tool
        if self._deferred.pop(name, None) is not None:
            return _introduction(name, tool)
        return f"The tool {name} is available from now on."

    def load(self, content: Any) -> Any:
        """Return the ``content`` of a tool's result with the definitions of the deferred tools that
        it refers to, and offer them.

        Each tool is defined once: many references do not make a small request a large prompt.
        """
        if not isinstance(content, list):
            return content
        blocks: list[Any] = []
        functions: list[str] = []
        for block in content:
            tool = self._pop_deferred(block)
            if tool is None:
                blocks.append(block)
                continue
            self._offered[_name(tool)] = tool
            functions.append(f"<function>{encode(tool['function']).decode()}</function>")
        if functions:
            self.is_changed = True
            text = "\n".join(["<functions>", *functions, "</functions>"])
            blocks.append({"type": "text", "text": text})
        return blocks

    def _pop_deferred(self, block: Any) -> dict[str, Any] | None:
        """Return the deferred tool that ``block`` refers to, which is deferred no longer; None for
        other blocks.
        """
        if not isinstance(block, dict) or block.get("type") != "tool_reference":
            return None
        name = block.get("tool_name")
        return self._deferred.pop(name, None) if isinstance(name, str) else None

    def _define(self, definition: Any, where: str) -> str:
        tool = read_tool(definition, where)
        name = _name(tool)
        if not name:
            raise RequestError(f"{where}.name must not be empty")
        self._known[name] = tool
        self._offered[name] = tool
        if not self._declared:
            return f"The tool {name} is available from now on."
        return _introduction(name, tool)


def _introduction(name: str, tool: dict[str, Any]) -> str:
    text = encode(tool["function"]).decode()
    return f"The tool {name} is available from now on, called like the others:\n{text}"


def _name(tool: dict[str, Any]) -> str:
    return str(tool["function"]["name"])
