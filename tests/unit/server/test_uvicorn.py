"""The parts of uvicorn that are no interface of it, and that `guard` and `run` rely on.

A release that changes them fails here first; then the upper bound in pyproject.toml can move.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path

import h11
import uvicorn
from h11._writers import ChunkedWriter
from uvicorn.protocols.http import h11_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from pyctl.server.guard import CLOSE_HEADER

ROOT = Path(__file__).parents[3]


async def app(scope: object, receive: object, send: object) -> None:
    """Answer nothing."""


def parameters(function: object) -> list[str]:
    assert callable(function)
    return list(inspect.signature(function).parameters)


def test_a_connection_has_what_its_guard_reads_and_changes() -> None:
    """The guard overrides internals of uvicorn. Each name and parameter that it uses is checked
    here, so that an update of uvicorn fails in this test and not in a connection.
    """
    assert parameters(H11Protocol.__init__)[:4] == ["self", "config", "server_state", "app_state"]
    for name, expected in (
        ("connection_made", ["transport"]),
        ("data_received", ["data"]),
        ("connection_lost", ["exc"]),
    ):
        assert parameters(getattr(H11Protocol, name)) == ["self", *expected]
    assert (
        parameters(H11Protocol.on_response_complete)
        == parameters(H11Protocol.handle_events)
        == ["self"]
    )
    assert parameters(H11Protocol.eof_received) == ["self"]
    assert parameters(ChunkedWriter.send_data) == ["self", "data", "write"]
    assert h11_impl.CLOSE_HEADER == CLOSE_HEADER  # type: ignore[attr-defined]
    assert 'if CLOSE_HEADER in self.scope["headers"]' in inspect.getsource(
        RequestResponseCycle.send
    )

    async def look() -> None:
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        state = ServerState()
        config.load()
        connection = H11Protocol(config, state, {})
        assert connection.connections is state.connections
        assert isinstance(connection.timeout_keep_alive, int)
        assert isinstance(connection.conn, h11.Connection)
        assert {"_writer"} <= vars(connection.conn).keys()
        assert connection.conn.their_state is h11.IDLE
        assert connection.conn.trailing_data == (b"", False)
        assert connection.cycle is None
        assert connection.conn.their_http_version is None
        assert {"transport", "flow", "loop", "scheme"} <= vars(connection).keys()

    asyncio.run(look())
    source = inspect.getsource(RequestResponseCycle.__init__)
    assert {"self.response_started", "self.response_complete"} <= set(
        re.findall(r"self\.\w+", source)
    )
    assert "self.read_paused = False" in inspect.getsource(FlowControl.__init__)


def test_a_server_has_what_its_end_relies_on() -> None:
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    assert server.started is False
    assert server.should_exit is False
    assert server.server_state.tasks == set()
    assert server.server_state.connections == set()
    assert parameters(uvicorn.Server.startup) == ["self", "sockets"]
    assert parameters(uvicorn.Server.shutdown) == ["self", "sockets"]
    assert parameters(uvicorn.Server.on_tick) == ["self", "counter"]
    # In its source: the package sse-starlette, which comes with mcp, puts another function there.
    assert "def handle_exit(self, sig: int, frame: " in inspect.getsource(uvicorn.server)
    assert "for server in self.servers" in inspect.getsource(uvicorn.Server.shutdown)
    assert "self.on_tick(counter)" in inspect.getsource(uvicorn.Server.main_loop)


def test_no_release_is_installed_that_was_not_looked_at() -> None:
    found = re.search(
        r'"uvicorn>=[\d.]+,<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert found is not None
    assert tuple(map(int, uvicorn.__version__.split(".")[:2])) < (int(found[1]), int(found[2]))
