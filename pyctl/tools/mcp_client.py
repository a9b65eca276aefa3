"""Tools of MCP servers: each server is a child process that is started to list its tools, and again to call them."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import anyio
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import PaginatedRequestParams

from pyctl.limit import limit
from pyctl.text import one_line
from pyctl.tools import McpServer

__all__ = ["McpClient", "McpTool"]

log = logging.getLogger("pyctl")

_LIST_SECONDS = limit(10.0, "an MCP server that lists its tools at the start", "without its tools", "process", "s")
_RETRY_SECONDS = 5.0
_MOST_TOOLS = limit(256, "tools of an MCP server", "the others are left out", "process")
_RESULT_LETTERS = limit(256 << 10, "text of a result of an MCP tool", "truncated", "reply", "characters")
_CLOSE_SECONDS = 0.5
_WITH_PARENT = Path(__file__).with_name("with_parent.py")


@dataclass(frozen=True)
class McpTool:
    """A tool as its server describes it; ``schema`` is that of its arguments."""

    server: str
    name: str
    description: str
    schema: Mapping[str, Any]
    reads_only: bool


class McpClient:
    """The MCP servers of a process, on an event loop in a thread of its own. Methods may be called by any thread.

    `start` returns at once, and `tools` waits for what was started there.
    """

    def __init__(self, servers: Sequence[McpServer]) -> None:
        self._connections = {server.name: _Connection(server) for server in servers}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pyctl-mcp", daemon=True)
        self._found: list[Future[list[McpTool]]] = []

    def start(self) -> None:
        """Start all servers to list their tools."""
        self._thread.start()
        for connection in self._connections.values():
            self._found.append(asyncio.run_coroutine_threadsafe(connection.tools(), self._loop))

    def tools(self) -> list[McpTool]:
        """The tools of all servers that answered."""
        return [tool for found in self._found for tool in found.result()]

    def call(self, server: str, tool: str, arguments: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """The result of ``tool``; ``{"error": ...}`` if it failed, took too long, or the server cannot be started."""
        return asyncio.run_coroutine_threadsafe(self._connections[server].call(tool, arguments), self._loop)

    def close(self) -> None:
        """End calls, then the servers, for which there is half a second; they end with this process in any case."""
        if not self._thread.is_alive():
            return

        async def close() -> None:
            await asyncio.wait([asyncio.ensure_future(each.close()) for each in self._connections.values()])

        with suppress(TimeoutError, RuntimeError):
            asyncio.run_coroutine_threadsafe(close(), self._loop).result(_CLOSE_SECONDS)


class _Connection:
    """The process of one server; all methods belong to the loop."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._lock = asyncio.Lock()
        self._running: asyncio.Task[None] | None = None
        self._session: ClientSession | None = None
        self._ending = asyncio.Event()
        self._retry_at = 0.0
        self._is_closed = False
        self._calls: set[asyncio.Task[Any]] = set()

    async def tools(self) -> list[McpTool]:
        """Start the server, ask for its tools, and end it; none if that fails, which is logged."""
        name = self._server.name
        if not self._server.command:
            log.warning("MCP server %s left out: it has no command", one_line(name))
            return []
        with tempfile.TemporaryFile() as errors:
            try:
                with anyio.fail_after(_LIST_SECONDS):
                    found = await self._listed(await self._connected(errors))
                log.info("MCP server %s: %d tools", one_line(name), len(found))
            except Exception as error:
                found = []
                log.warning("MCP server %s left out: %s%s", one_line(name), _reason(error), _tail(errors))
            await self._end()
            self._retry_at = 0.0
        return found[:_MOST_TOOLS]

    async def _listed(self, session: ClientSession) -> list[McpTool]:
        found: list[McpTool] = []
        cursor: str | None = None
        while len(found) < _MOST_TOOLS:
            params = PaginatedRequestParams(cursor=cursor) if cursor else None
            page = (await session.list_tools(params=params)).model_dump(by_alias=True)
            for tool in page["tools"]:
                hints = tool.get("annotations") or {}
                found.append(
                    McpTool(
                        self._server.name,
                        tool["name"],
                        tool.get("description") or "",
                        tool.get("inputSchema") or {},
                        hints.get("readOnlyHint") is True,
                    )
                )
            cursor = page.get("nextCursor")
            if not cursor:
                break
        return found

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The result of ``tool`` by the server, which is started if it does not run."""
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            with anyio.fail_after(self._server.timeout_ms / 1000):
                session = await self._connected()
                result = await session.call_tool(tool, dict(arguments))
            return _as_result(result.model_dump(by_alias=True))
        except TimeoutError:
            return {"error": f"{tool} took longer than {self._server.timeout_ms} ms"}
        except asyncio.CancelledError:
            return {"error": "the server is shutting down"}
        except Exception as error:
            return {"error": _reason(error)}
        finally:
            self._calls.discard(task)

    async def close(self) -> None:
        """End the calls that run, then the process."""
        self._is_closed = True
        for task in tuple(self._calls):
            task.cancel()
        await self._end()

    async def _connected(self, errors: IO[bytes] | None = None) -> ClientSession:
        """A session with the running process. Raises an exception that says why there is none."""
        async with self._lock:
            if self._session is not None:
                return self._session
            if self._is_closed:
                raise ConnectionError("the server is shutting down")
            if time.monotonic() < self._retry_at:
                raise ConnectionError("the MCP server failed to start a moment ago")
            await self._end()
            self._ending = asyncio.Event()
            ready: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
            self._running = asyncio.create_task(self._run(ready, self._ending, errors))
            try:
                self._session = await asyncio.shield(ready)
            except BaseException:
                self._retry_at = time.monotonic() + _RETRY_SECONDS
                self._ending.set()
                raise
            return self._session

    async def _end(self) -> None:
        running, self._running, self._session = self._running, None, None
        if running is not None:
            self._ending.set()
            await asyncio.wait([running])

    async def _run(self, ready: asyncio.Future[ClientSession], ending: asyncio.Event, errors: IO[bytes] | None) -> None:
        """The life of one process, from its start to ``ending`` or to the end of its output."""
        server = self._server
        command = StdioServerParameters(
            command=sys.executable,
            args=["-I", "-S", str(_WITH_PARENT), server.command, *server.args],
            env={**os.environ, **server.env},
            cwd=os.path.expanduser(server.cwd) or None,
            encoding_error_handler="replace",
        )
        forward, received = anyio.create_memory_object_stream[Any](0)
        try:
            with open(os.devnull, "wb") as nowhere:
                async with stdio_client(command, errlog=errors or nowhere) as (source, sink):  # type: ignore[arg-type]
                    passing = asyncio.create_task(_pass_on(source, forward, ending))
                    async with ClientSession(received, sink) as session:
                        starting = asyncio.create_task(session.initialize())
                        over = asyncio.create_task(ending.wait())
                        await asyncio.wait([starting, over], return_when=asyncio.FIRST_COMPLETED)
                        if starting.done():
                            starting.result()
                            if not ready.done():
                                ready.set_result(session)
                            await over
                        starting.cancel()
                    passing.cancel()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
        finally:
            if self._ending is ending:
                self._session = None
            if not ready.done():
                ready.set_exception(ConnectionError("the MCP server ended before it answered"))
            ready.exception()


async def _pass_on(source: Any, sink: Any, ending: asyncio.Event) -> None:
    """Pass on what a server says, and note the end of it."""
    async with sink:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            async for message in source:
                await sink.send(message)
    ending.set()


def _as_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """The texts of a result; what is no text is named."""
    parts = [
        part.get("text") or "" if part.get("type") == "text" else f"[{part.get('type')}, not shown]"
        for part in result.get("content") or ()
    ]
    text = "\n".join(parts)
    if len(text) > _RESULT_LETTERS:
        text = text[:_RESULT_LETTERS] + "\n[output truncated]"
    return {"error": text or "the tool failed"} if result.get("isError") else {"plain_text_response": text}


def _reason(error: BaseException) -> str:
    """The first error of a group."""
    while (inner := getattr(error, "exceptions", None)) is not None:
        error = inner[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {_LIST_SECONDS:g} s"
    return one_line(str(error)[:1000]) or type(error).__name__


def _tail(errors: IO[bytes]) -> str:
    """The last line that a server wrote to standard error, after a colon."""
    with suppress(OSError, ValueError):
        errors.seek(max(errors.seek(0, os.SEEK_END) - 1000, 0))
        lines = errors.read().decode("utf-8", "replace").strip().splitlines()
        return f": {one_line(lines[-1])}" if lines else ""
    return ""
