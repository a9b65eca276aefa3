"""The tools of this process by their names: their definitions for a model, and their calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyctl.errors import NotFoundError
from pyctl.tools import ToolSettings

if TYPE_CHECKING:  # the package mcp may be missing
    from pyctl.tools.mcp_client import McpClient, McpTool

__all__ = ["RunnableTool", "ToolBox"]


@dataclass(frozen=True)
class RunnableTool:
    """A tool of an MCP server, under the name that the model knows."""

    name: str
    tool: McpTool
    client: McpClient

    def definition(self) -> dict[str, Any]:
        """In OpenAI's form."""
        function = {"name": self.name, "description": self.tool.description, "parameters": dict(self.tool.schema)}
        return {"type": "function", "function": function}

    def for_client(self) -> dict[str, Any]:
        """As GET /tools shows it."""
        return {
            "display_name": self.name,
            "tool": self.name,
            "type": "mcp",
            "permissions": {"write": not self.tool.reads_only},
            "uses_cwd": False,
            "definition": self.definition(),
        }

    def start(self, arguments: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Call it; to cancel the future ends the call. The result is ``{"error": ...}`` if it failed."""
        return self.client.call(self.tool.server, self.tool.name, arguments)

    def run(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call it and wait for the result; an exception such as KeyboardInterrupt ends the call."""
        call = self.start(arguments)
        try:
            return call.result()
        finally:
            call.cancel()


@dataclass
class ToolBox:
    """The tools that ``settings`` name. `start` begins to ask MCP servers for theirs, `wait` waits until all answered.

    Any thread may call tools.
    """

    settings: ToolSettings = field(default_factory=ToolSettings)
    _tools: dict[str, RunnableTool] = field(default_factory=dict)
    _mcp: McpClient | None = None

    def start(self) -> None:
        """Start the servers; returns at once."""
        if self.settings.mcp_servers:
            # Only now: it takes most of a second.
            from pyctl.tools.mcp_client import McpClient

            self._mcp = McpClient(self.settings.mcp_servers)
            self._mcp.start()

    def wait(self) -> None:
        """Add the tools of the servers; of two that have the same name the first counts."""
        if self._mcp is not None:
            for found in self._mcp.tools():
                name = f"{found.server}_{found.name}"
                self._tools.setdefault(name, RunnableTool(name, found, self._mcp))

    def close(self) -> None:
        """End the servers, and calls of their tools."""
        if self._mcp is not None:
            self._mcp.close()

    def __iter__(self) -> Iterator[RunnableTool]:
        return iter(tuple(self._tools.values()))

    def __bool__(self) -> bool:
        return bool(self.settings.mcp_servers)

    def named(self, name: str) -> RunnableTool:
        """The tool ``name``. Raises NotFoundError."""
        if (tool := self._tools.get(name)) is None:
            raise NotFoundError(f"unknown tool {name[:100]!r}")
        return tool
