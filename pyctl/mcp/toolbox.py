"""The tools of this process by their names."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyctl.errors import NotFoundError
from pyctl.mcp import ToolSettings

if TYPE_CHECKING:  # the package mcp may be missing
    from pyctl.mcp.mcp_client import McpConnection, McpTool

__all__ = ["ToolBox"]

_CLOSE_SECONDS = 0.5


@dataclass
class ToolBox:
    """The tools of the MCP servers of ``settings``, which run on an event loop in a separate
    thread.

    `start` starts to list them, `wait` waits until the servers have answered. Any thread may call
    tools.
    """

    settings: ToolSettings = field(default_factory=ToolSettings)
    _tools: dict[str, McpTool] = field(default_factory=dict)
    _connections: list[McpConnection] = field(default_factory=list)
    _found: list[concurrent.futures.Future[list[McpTool]]] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the servers; return at once."""
        if not self.settings.mcp_servers:
            return
        # Only now: it takes most of a second.
        from pyctl.mcp.mcp_client import McpConnection

        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="pyctl-mcp", daemon=True).start()
        self._connections = [
            McpConnection(server, self._loop) for server in self.settings.mcp_servers
        ]
        self._found = [
            asyncio.run_coroutine_threadsafe(connection.tools(), self._loop)
            for connection in self._connections
        ]

    def wait(self, seconds: float | None = None) -> None:
        """Add the tools of the servers; of two that have the same name the first server's counts.

        Those of a server that takes longer than ``seconds`` are added when it answers.
        """
        _, late = concurrent.futures.wait(self._found, seconds)
        self._take()
        for listing in late:
            listing.add_done_callback(lambda _: self._take())

    def _take(self) -> None:
        """Collect the tools of the servers that have answered."""
        tools: dict[str, McpTool] = {}
        for listing in self._found:
            if listing.done() and not listing.cancelled():
                for tool in listing.result():
                    tools.setdefault(tool.name, tool)
        self._tools = tools  # at once: other threads read it

    def close(self) -> None:
        """End calls, then the servers, for which there is half a second; they end with this process
        in any case.
        """

        async def close() -> None:
            await asyncio.gather(*(connection.close() for connection in self._connections))

        if self._loop is not None:
            concurrent.futures.wait(
                [asyncio.run_coroutine_threadsafe(close(), self._loop)], _CLOSE_SECONDS
            )

    def __iter__(self) -> Iterator[McpTool]:
        return iter(tuple(self._tools.values()))

    def __bool__(self) -> bool:
        return bool(self.settings.mcp_servers)

    def get(self, name: str) -> McpTool:
        """Return the tool ``name``. Raises NotFoundError."""
        if (tool := self._tools.get(name)) is None:
            raise NotFoundError(f"unknown tool {name[:100]!r}")
        return tool
