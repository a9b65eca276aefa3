"""Tools of MCP servers: each server is a child process that is started to list its tools, and again
to call them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import anyio
from mcp import Client, ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import (
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    JSONRPCRequest,
    PaginatedRequestParams,
)

from pyctl.mcp import McpServer, bounded
from pyctl.processes.child_environment import child_environment
from pyctl.settings.limit import limit
from pyctl.text import one_line

__all__ = ["McpConnection", "McpTool"]

log = logging.getLogger("pyctl")
for _name in ("mcp", "client"):  # the package's own, with tracebacks for a server's messages
    logging.getLogger(_name).setLevel(logging.CRITICAL)

_LIST_SECONDS = limit(
    30.0, "an MCP server that lists its tools at the start", "without its tools", "process", "s"
)
_MAX_TOOLS = limit(256, "tools of an MCP server", "the others are left out", "process")
_MESSAGE_BYTES = limit(
    16 << 20, "message of an MCP server", "the server is ended", "process", "bytes"
)
_KEEPER = Path(__file__).with_name("keeper.py")


@dataclass(frozen=True)
class McpTool:
    """A tool of an MCP server, under the name that the model gets; ``schema`` describes its
    arguments.

    ``call`` starts a call, which ends when its future is cancelled. Its result is ``{"error":
    ...}`` if it failed, took too long, or the server cannot be started.
    """

    name: str
    description: str
    schema: Mapping[str, Any]
    reads_only: bool
    call: Callable[[Mapping[str, Any]], Future[dict[str, Any]]]

    def run(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of a call; an exception such as KeyboardInterrupt ends it."""
        call = self.call(arguments)
        try:
            return call.result()
        finally:
            call.cancel()

    def definition(self) -> dict[str, Any]:
        """Return the definition in OpenAI's form."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.schema),
        }
        return {"type": "function", "function": function}


class McpConnection:
    """The process of one server, started for the first call and after it has ended; methods belong
    to ``loop``.
    """

    def __init__(self, server: McpServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._process: _Process | None = None
        self._is_closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def tools(self) -> list[McpTool]:
        """Start the server, list its tools, and end it. Return none if that fails, which is
        logged.
        """
        name = one_line(self._server.name)
        if not self._server.command:
            log.warning("MCP server %s left out: it has no command", name)
            return []
        tools: list[McpTool] = []
        with tempfile.TemporaryFile() as errors, self._task():
            process = _Process(self._server, errors)
            try:
                with anyio.fail_after(_LIST_SECONDS):
                    await self._list(await process.session(), tools)
                log.info("MCP server %s: %d tools", name, len(tools))
            except (Exception, asyncio.CancelledError) as error:
                tools.clear()
                log.warning("MCP server %s left out: %s%s", name, _reason(error), _tail(errors))
            await process.end()
        return tools[:_MAX_TOOLS]

    async def _list(self, session: ClientSession, found: list[McpTool]) -> None:
        """Append the tools of all pages of the server's list to ``found``, at most _MAX_TOOLS and
        the rest of a page.
        """
        cursor: str | None = None
        while len(found) < _MAX_TOOLS:
            page = await session.list_tools(
                params=PaginatedRequestParams(cursor=cursor) if cursor else None
            )
            for tool in page.tools:
                name = f"{self._server.name}_{tool.name}"
                description = tool.description or ""
                reads_only = (
                    tool.annotations is not None and tool.annotations.read_only_hint is True
                )
                found.append(
                    McpTool(
                        name,
                        description,
                        tool.input_schema,
                        reads_only,
                        partial(self._begin, tool.name),
                    )
                )
            if not (cursor := page.next_cursor):
                return

    def _begin(self, tool: str, arguments: Mapping[str, Any]) -> Future[dict[str, Any]]:
        return asyncio.run_coroutine_threadsafe(self._call(tool, dict(arguments)), self._loop)

    async def _call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the result of ``tool`` by the server, which is started if it does not run.

        A server may continue a call that was cancelled or took too long. So its process, with all
        that it started, ends then, as soon as it has no other call; the next call starts another.
        """
        try:
            # Arguments that cannot be sent, such as lone surrogates, have to fail here: the client
            # would lose its connection.
            params = {"name": tool, "arguments": arguments}
            JSONRPCRequest(
                jsonrpc="2.0", id=0, method="tools/call", params=params
            ).model_dump_json()
            request = CallToolRequest(params=CallToolRequestParams(name=tool, arguments=arguments))
            with (
                self._task(),
                anyio.fail_after(self._server.timeout_ms / 1000),
                self._running().call() as process,
            ):
                # Not `call_tool`, which has the server's own regular expressions run over the
                # result.
                result = await (await process.session()).send_request(request, CallToolResult)
            return _as_result(result.model_dump(by_alias=True))
        except TimeoutError:
            return {"error": f"{tool} took longer than {self._server.timeout_ms} ms and was ended"}
        except Exception as error:
            return {"error": _reason(error)}
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            return {"error": "the server is shutting down"}

    async def close(self) -> None:
        """End the running calls, then the process."""
        self._is_closed = True
        for task in tuple(self._tasks):
            task.cancel()
        if self._process is not None:
            await self._process.end()

    @contextmanager
    def _task(self) -> Iterator[None]:
        """Register the current task for the block, so that `close` can cancel it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def _running(self) -> _Process:
        """Return the process, which may still be starting. Raises ConnectionError if there is
        none.
        """
        if self._is_closed:
            raise ConnectionError("the server is shutting down")
        if self._process is None or self._process.is_over:
            self._process = _Process(self._server)
        return self._process


class _Process:
    """A process of a server, which starts at once."""

    def __init__(self, server: McpServer, errors: IO[bytes] | None = None) -> None:
        self.is_over = False
        self._n_calls = 0
        self._scope = anyio.CancelScope()
        self._session: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(server, errors))

    async def session(self) -> ClientSession:
        """Return the session with the process. Raises an exception with the reason why there is
        none.
        """
        return await asyncio.shield(self._session)

    @contextmanager
    def call(self) -> Iterator[_Process]:
        """Count a call for the time of the block. A cancelled one ends the process, as soon as
        there is no other.
        """
        self._n_calls += 1
        try:
            yield self
        except asyncio.CancelledError:
            self.is_over = True
            raise
        finally:
            self._n_calls -= 1
            if self.is_over and not self._n_calls:
                self._scope.cancel()

    async def end(self) -> None:
        """End the process, and those that it started."""
        self._scope.cancel()
        await asyncio.wait([self._life])

    async def _live(self, server: McpServer, errors: IO[bytes] | None) -> None:
        why: Exception = ConnectionError("the MCP server ended before it answered")
        try:
            with self._scope:
                async with Client(self._transport(server, errors)) as client:
                    self._session.set_result(client.session)
                    await anyio.sleep_forever()
        except Exception as error:
            why = error
        self.is_over = True
        if not self._session.done():
            self._session.set_exception(why)
        self._session.exception()

    @asynccontextmanager
    async def _transport(self, server: McpServer, errors: IO[bytes] | None) -> AsyncIterator[Any]:
        """Provide the streams of messages from and to the process."""
        command = StdioServerParameters(
            command=sys.executable,
            args=["-I", "-S", str(_KEEPER), str(_MESSAGE_BYTES), server.command, *server.args],
            env=child_environment(server.env),
            cwd=os.path.expanduser(server.cwd) or None,
            encoding_error_handler="replace",
        )
        forward, received = anyio.create_memory_object_stream[Any](0)
        with open(os.devnull, "wb") as nowhere, forward, received:
            to: Any = errors or nowhere
            async with (
                stdio_client(command, errlog=to) as (source, sink),
                anyio.create_task_group() as group,
            ):
                group.start_soon(self._pass_on, source, forward)
                yield received, sink
                group.cancel_scope.cancel()

    async def _pass_on(self, source: Any, sink: Any) -> None:
        """Pass on a server's messages, and note its end, which the client does not report."""
        async with sink:
            with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                async for message in source:
                    if isinstance(message, Exception):
                        log.debug("output of an MCP server is not a message: %s", _reason(message))
                    await sink.send(message)
        self.is_over = True
        self._scope.cancel()


def _as_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts of a result; other parts are named."""
    parts = [
        part.get("text") or "" if part.get("type") == "text" else f"[{part.get('type')}, not shown]"
        for part in result.get("content") or ()
    ]
    text = bounded("\n".join(parts))
    return (
        {"error": text or "the tool failed"}
        if result.get("isError")
        else {"plain_text_response": text}
    )


def _reason(error: BaseException) -> str:
    """Return the first error of a group."""
    while (inner := getattr(error, "exceptions", None)) is not None:
        error = inner[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {_LIST_SECONDS:g} s"
    return one_line(str(error)[:1000]) or type(error).__name__


def _tail(errors: IO[bytes]) -> str:
    """Return the last line that a server wrote to standard error, after a colon."""
    with suppress(OSError, ValueError):
        errors.seek(max(errors.seek(0, os.SEEK_END) - 1000, 0))
        lines = errors.read().decode("utf-8", "replace").strip().splitlines()
        return f": {one_line(lines[-1])}" if lines else ""
    return ""
