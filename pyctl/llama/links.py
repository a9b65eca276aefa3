"""The connections to workers, and the loss of one.

The library's client has no time limits, and aborts the process when a connection fails. So the system watches the
connections: the loss of a machine is detected within some seconds, also without traffic.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from pyctl.limit import limit

__all__ = ["Links", "keep_alive", "links", "sockets_at"]

log = logging.getLogger("pyctl")

SILENT_SECONDS = limit(30, "a worker's machine that does not answer", "the server ends, exit code 1", "process", "s")

PROBE_AFTER, PROBE_EVERY = 10, 5
"""Seconds without a byte before the system asks the other side, and between two questions."""

SAVING_SECONDS = limit(
    30.0, "writing the cache after a worker was lost", "the process exits with what is on disk", "process", "s"
)

ESTABLISHED = 1
"""The first byte of tcp_info: TCP_ESTABLISHED."""


@dataclass(frozen=True)
class _Link:
    """A connection to the worker at ``endpoint``: a descriptor of the library, and the inode of its socket."""

    endpoint: str
    descriptor: int
    inode: int


class Links:
    """The connections of this process to workers. Thread-safe."""

    def __init__(self) -> None:
        self._links: list[_Link] = []
        self._addresses: dict[tuple[str, int], str] = {}
        self._lost = ""
        self._is_watched = False

    def known(self, address: tuple[str, int]) -> str:
        """The endpoint that is connected at ``address``, "" for none."""
        return self._addresses.get(address, "")

    def add(self, endpoint: str, address: tuple[str, int]) -> None:
        """Watch the library's connection to the worker at ``endpoint``, an IPv4 ``address``."""
        self._addresses[address] = endpoint
        for descriptor in sockets_at(peer=address):
            with contextlib.suppress(OSError):
                keep_alive(descriptor)
                self._links.append(_Link(endpoint, descriptor, os.fstat(descriptor).st_ino))

    def lost(self) -> str:
        """The lost worker, as a line for the log; "" while all are connected. The caller polls it, and then saves."""
        self._is_watched = True
        return self._lost or next((_lost_text(link.endpoint) for link in self._links if _is_over(link)), "")

    def end(self) -> NoReturn:
        """Called by the thread whose call has failed, and never returns: another one saves and ends the process.

        While nothing is served yet, the process ends at once.
        """
        over = [link.endpoint for link in self._links if _is_over(link)]
        self._lost = _lost_text(over[0] if over else ", ".join(self._addresses.values()))
        if self._is_watched:
            time.sleep(SAVING_SECONDS)
        log.critical("the program ends: %s", self._lost)
        with contextlib.suppress(Exception):
            logging.shutdown()
            sys.stderr.flush()
        os._exit(1)


links = Links()
"""Those of this process: ggml's devices are global, too."""


def _lost_text(endpoint: str) -> str:
    return f"the worker {endpoint} is lost"


def _is_over(link: _Link) -> bool:
    """Whether the other side has ended the connection, or does not answer."""
    try:
        if os.fstat(link.descriptor).st_ino != link.inode:
            return True
        with _borrowed(link.descriptor) as sock:
            return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED
    except OSError:
        return True


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The socket of a ``descriptor`` that the library closes. OSError if it is none."""
    sock = socket.socket(fileno=descriptor)
    try:
        yield sock
    finally:
        sock.detach()


def sockets_at(*, peer: tuple[str, int] | None = None, name: tuple[str, int] | None = None) -> list[int]:
    """The descriptors of this process that are connected to ``peer``, or listen at ``name``."""
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), _borrowed(descriptor) as sock:
            if sock.family != socket.AF_INET:
                continue
            listens = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            if (peer is not None and sock.getpeername() == peer) or (listens and name == sock.getsockname()):
                found.append(descriptor)
    return found


def keep_alive(descriptor: int) -> None:
    """Have the system end the connection when the other machine does not answer; of a listening socket, all that it
    accepts from now on. OSError if it is closed."""
    with _borrowed(descriptor) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (SILENT_SECONDS - PROBE_AFTER) // PROBE_EVERY)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS)
