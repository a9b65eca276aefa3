"""Clients that close their sending side: those that read on get their reply, those that are gone
free their work.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from pyctl.server.guard import ConnectionGuard, GuardedHttpProtocol
from tests.unit.server.parts import in_loop

REQUEST = b"POST /%d HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"


class App:
    """Answers when ``opened``, and records the paths that were answered and those whose client
    left.
    """

    def __init__(self, *, starts: bool = False) -> None:
        self.opened = asyncio.Event()
        self.begun = asyncio.Event()
        self.left = asyncio.Event()
        self.answered: list[str] = []
        self._starts = starts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer when ``opened``, unless the client leaves first."""
        while (await receive()).get("more_body"):
            pass
        if self._starts:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
        self.begun.set()
        gone = asyncio.ensure_future(receive())
        opened = asyncio.ensure_future(self.opened.wait())
        await asyncio.wait((gone, opened), return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if gone.done():
            assert gone.result()["type"] == "http.disconnect"
            self.left.set()
            return
        gone.cancel()
        self.answered.append(scope["path"])
        if not self._starts:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-length", b"3")],
                }
            )
        await send({"type": "http.response.body", "body": b"two", "more_body": False})


@contextlib.asynccontextmanager
async def served(app: App, path: str = "") -> AsyncIterator[Any]:
    """Serve ``app`` at a UNIX socket, or else at a port; yield its address."""
    guard = ConnectionGuard(8)
    state = ServerState()
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
    config.load()
    family = socket.AF_UNIX if path else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.bind(path or ("127.0.0.1", 0))
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: GuardedHttpProtocol(guard, config, state), sock=listening
        )

        async def look() -> None:
            while True:
                guard.close_slow_clients(state.connections)
                await asyncio.sleep(0.01)

        looking = asyncio.ensure_future(look())
        try:
            yield listening.getsockname()
        finally:
            looking.cancel()
            server.close()
            for connection in tuple(state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)


async def connected(address: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(address, str):
        return await asyncio.open_unix_connection(address)
    return await asyncio.open_connection(*address)


@pytest.mark.parametrize("kind", ["port", "socket"])
@in_loop
async def test_a_client_that_only_reads_gets_its_replies(kind: str, tmp_path: Path) -> None:
    app = App()
    async with served(app, str(tmp_path / "s") if kind == "socket" else "") as address:
        reader, writer = await connected(address)
        writer.write(REQUEST % 1 + REQUEST % 2)
        writer.write_eof()
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await app.begun.wait()
        app.opened.set()
        rest = await reader.read()
        assert app.answered == ["/1", "/2"]
        assert rest.count(b" 200 OK") == 2
        assert rest.count(b"two") == 2
        writer.close()


@pytest.mark.parametrize("kind", ["port", "socket"])
@in_loop
async def test_the_work_for_a_client_that_is_gone_ends(kind: str, tmp_path: Path) -> None:
    app = App()
    async with served(app, str(tmp_path / "s") if kind == "socket" else "") as address:
        _, writer = await connected(address)
        writer.write(REQUEST % 1)
        await app.begun.wait()
        writer.close()
        await app.left.wait()
        assert not app.answered


@pytest.mark.parametrize(
    ("request_bytes", "starts"),
    [
        (REQUEST % 1, True),
        ((REQUEST % 1).replace(b"HTTP/1.1", b"HTTP/1.0"), False),
    ],
    ids=["reply has started", "HTTP/1.0"],
)
@in_loop
async def test_a_client_counts_as_gone_where_nothing_can_be_written(
    request_bytes: bytes, starts: bool
) -> None:
    app = App(starts=starts)
    async with served(app) as address:
        reader, writer = await connected(address)
        writer.write(request_bytes)
        await app.begun.wait()
        writer.write_eof()
        await app.left.wait()
        assert b" 100 " not in await reader.read()
        writer.close()


@in_loop
async def test_a_connection_that_ends_within_a_request_is_closed() -> None:
    async with served(App()) as address:
        reader, writer = await connected(address)
        writer.write((REQUEST % 1)[:-1])
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
