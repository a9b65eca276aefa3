"""Connections to workers, as sockets of this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pyctl.llama.links import Links, keep_alive, sockets_at
from tests.waiting import until

Address = tuple[str, int]


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_connection_that_the_other_side_ends_is_lost(listening: socket.socket) -> None:
    links, address = Links(), listening.getsockname()
    with socket.create_connection(address), listening.accept()[0] as other:
        links.add("a.lan:1", address)
        assert (links.known(address), links.known(("127.0.0.1", 1))) == ("a.lan:1", "")
        assert links.lost() == ""
        other.close()
        until(links.lost)
        assert links.lost() == "the worker a.lan:1 is lost"


def test_of_two_connections_the_lost_one_is_named(listening: socket.socket) -> None:
    with ExitStack() as stack:
        second = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        links, others = Links(), []
        for name, server in (("a:1", listening), ("b:2", second)):
            stack.enter_context(socket.create_connection(server.getsockname()))
            others.append(stack.enter_context(server.accept()[0]))
            links.add(name, server.getsockname())
        others[1].close()
        until(links.lost)
        assert links.lost() == "the worker b:2 is lost"


def test_a_descriptor_that_was_closed_is_lost_and_stays_whole(listening: socket.socket) -> None:
    """Another file that gets the number is not taken for it, and nothing closes it."""
    links, address = Links(), listening.getsockname()
    own = socket.create_connection(address)
    with listening.accept()[0]:
        links.add("a:1", address)
        number = own.detach()
        socket.socket(fileno=number).close()
        with socket.socket() as reused:
            assert links.lost() == "the worker a:1 is lost"
            assert reused.fileno() >= 0
            reused.bind(("127.0.0.1", 0))


def test_what_is_connected_or_listens_is_found_by_its_address(listening: socket.socket) -> None:
    address = listening.getsockname()
    assert sockets_at(name=address) == [listening.fileno()]
    assert sockets_at(peer=address) == []
    with socket.create_connection(address) as own:
        assert sockets_at(peer=address) == [own.fileno()]


def test_the_system_asks_machines_that_say_nothing(listening: socket.socket) -> None:
    """What a listening socket accepts has its settings."""
    keep_alive(listening.fileno())
    with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
