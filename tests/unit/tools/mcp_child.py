"""An MCP server for tests: greets, fails, sleeps, tells of its variables and ends."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

server = MCPServer("child")


@server.tool(annotations=ToolAnnotations(read_only_hint=True), structured_output=False)
def greet(name: str) -> str:
    """Greet someone."""
    return f"Hello {name}, from {os.environ.get('PLACE', 'nowhere')} in {os.getcwd()}"


@server.tool(structured_output=False)
def fail() -> str:
    """Fail."""
    raise ValueError("it is Monday")


@server.tool(structured_output=False)
def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "awake"


@server.tool(structured_output=False)
def end() -> str:
    """End the process."""
    os._exit(3)


@server.tool(structured_output=False)
def pid() -> str:
    """The number of the process."""
    return str(os.getpid())


if __name__ == "__main__":
    print("ready", file=sys.stderr)
    server.run("stdio")
