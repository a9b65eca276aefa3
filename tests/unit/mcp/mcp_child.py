"""An MCP server for tests: greets, fails, sleeps, tells of its variables, says much, starts others
and ends.

Names of tools as arguments leave the others out.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
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
    os.kill(os.getpid(), signal.SIGKILL)


@server.tool(structured_output=False)
def pid() -> str:
    """The number of the process."""
    return str(os.getpid())


@server.tool(structured_output=False)
def say(size: int) -> str:
    """Say much."""
    return "x" * size


@server.tool(annotations=ToolAnnotations(read_only_hint=True), structured_output=False)
def variables() -> str:
    """The variables that this process sees."""
    return json.dumps(dict(os.environ))


@server.tool(structured_output=False)
def work(path: str) -> str:
    """Start a process that leaves the session and loses its parent, write all numbers into a file,
    and go on.
    """
    detached = f"setsid sh -c 'echo $$ >> {path}; exec sleep 3600' >&- 2>&- &"
    subprocess.run(["sh", "-c", detached], check=True)
    beside = subprocess.Popen(["sleep", "3600"])
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n{beside.pid}\n")
    beside.wait()
    return "done"


@server.tool(annotations=ToolAnnotations(read_only_hint=True), structured_output=False)
def place() -> str:
    """The directory."""
    return os.getcwd()


@server.tool(structured_output=False)
def note(path: str, content: str) -> str:
    """Write a note; a test refuses it."""
    return "not written"


if __name__ == "__main__":
    print("ready", file=sys.stderr)
    left_out = (
        {tool.name for tool in asyncio.run(server.list_tools())} - set(sys.argv[1:])
        if sys.argv[1:]
        else ()
    )
    for name in left_out:
        server.remove_tool(name)
    server.run("stdio")
