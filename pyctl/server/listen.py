"""The addresses of a server, taken before its model is loaded."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator, Sequence

from pyctl.errors import ConfigError

__all__ = ["bind"]


@contextlib.contextmanager
def bind(hosts: Sequence[str] = ("127.0.0.1",), port: int = 8080) -> Iterator[list[socket.socket]]:
    """Take the addresses ``hosts`` (UNIX sockets if they end in .sock) and ``port``, for the time
    of the block.

    Port 0 is any free one, the same for all. Until the server listens, clients are refused; at UNIX
    sockets they wait. Raises ConfigError if an address cannot be had.
    """
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for host in hosts:
            try:
                if host.endswith(".sock"):
                    sock = stack.enter_context(contextlib.closing(_bind_unix(host)))
                    stack.callback(_unlink, host, _identity(host))
                else:
                    sock = stack.enter_context(
                        contextlib.closing(_bind(host, port, only_v6=len(hosts) > 1))
                    )
                    port = sock.getsockname()[1]
            except (OSError, OverflowError) as error:
                reason = (
                    error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                )
                address = host if host.endswith(".sock") else f"{host}:{port}"
                raise ConfigError(f"cannot listen on {address}: {reason}") from error
            sockets.append(sock)
        yield sockets


def _bind(host: str, port: int, *, only_v6: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and only_v6:  # else "::" also takes the port of 0.0.0.0
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise OSError(errno.EEXIST, "a file of that name exists")
            if _is_alive(path):
                raise OSError(errno.EADDRINUSE, "the address is in use", path)
            os.unlink(path)  # left by a server that was killed
        sock.bind(path)
        sock.listen()  # at once: clients take a closed port for a dead server
    except BaseException:
        sock.close()
        raise
    return sock


def _is_alive(path: str) -> bool:
    """Return whether a server listens at the socket ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(path)
        except (
            BlockingIOError,
            PermissionError,
        ):  # it has a queue, and that is full, or it is another user's
            return True
        except OSError:
            return False
        return True


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def _unlink(path: str, identity: tuple[int, int]) -> None:
    """Remove the socket ``path`` if it is still the one that was made here."""
    with contextlib.suppress(OSError):
        if _identity(path) == identity:
            os.unlink(path)
