"""The addresses on which a server listens."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from pyctl.errors import ConfigError
from pyctl.server.listen import bind
from tests.process.server.child_server import (
    complaints,
    is_healthy,
    line,
    server,
)


def test_several_addresses_have_the_same_port() -> None:
    with server("127.0.0.1,127.0.0.2") as process:
        first, second = line(process).split(", ")
        assert first.startswith("http://127.0.0.1:")
        assert second.startswith("http://127.0.0.2:")
        assert urlsplit(first).port == urlsplit(second).port
        assert is_healthy(first)
        assert is_healthy(second)


def test_both_families_at_once() -> None:
    try:
        with bind(["::1"], 0):
            pass
    except ConfigError:
        pytest.skip("no IPv6 here")
    with bind(["0.0.0.0", "::"], 0) as (four, six):
        assert four.getsockname()[1] == six.getsockname()[1]


def test_a_second_server_leaves_the_socket_of_the_first(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with server(path) as first:
        assert line(first) == f"unix://{path}"
        with server(path) as second:
            assert "the address is in use" in line(second)
            assert second.wait(60) == 2
        with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
            assert client.get("http://server/health").status_code == 200
        complaints(first)
    assert not os.path.exists(path)


def test_a_socket_that_is_taken_but_not_served_yet_is_no_leftover(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with bind([path]), pytest.raises(ConfigError, match="in use"), bind([path]):
        pass
    assert not os.path.exists(path)


def test_only_its_own_socket_is_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with bind([path]):
        os.unlink(path)
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(path)
    assert os.path.exists(path)
    (tmp_path / "file.sock").write_text("mine")
    with (
        pytest.raises(ConfigError, match="a file of that name"),
        bind([str(tmp_path / "file.sock")]),
    ):
        pass
    assert (tmp_path / "file.sock").read_text() == "mine"
