"""ggml's RPC backend: devices of workers on other machines, and a worker for those of this one.

The protocol has no encryption and no key, and a worker trusts its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pyctl import _core
from pyctl.errors import ConfigError
from pyctl.limit import limit
from pyctl.llama.devices import Device, ggml_library
from pyctl.llama.library import redirect_log
from pyctl.llama.links import keep_alive, links, sockets_at

__all__ = ["PROTOCOL", "connect_workers", "start_worker"]

PROTOCOL = (7, 0, 0)
"""The pinned release's version; the client aborts the process where the worker's differs."""

HELLO, CAPABILITIES = 14, 24
"""The command that asks for the version, and its bytes of capabilities, none of which is offered."""

HELLO_SECONDS = limit(
    5.0, "a worker's greeting at the start, and then its connection", "the program ends, exit code 2", "process", "s"
)

NO_ANSWER = "it does not answer: it serves another server, or its machine does not respond"

OWN_SOURCE = b"ggml-rpc"
"""Part of the message of an abort in the client; others are defects."""


@cache
def _backend() -> Any:
    """ggml with its RPC backend registered. Raises ConfigError if it cannot be loaded."""
    redirect_log()
    ggml = ggml_library()
    if not ggml.ggml_backend_reg_by_name(b"RPC"):
        path = Path(_core.__file__).with_name("lib") / "libggml-rpc.so"
        if not ggml.ggml_backend_load(str(path).encode()):
            raise ConfigError(f"cannot load the RPC backend {path}; reinstall pyctl")
    return ggml


def _function(name: bytes, result: Any, *arguments: Any) -> Any:
    ggml = _backend()
    address = ggml.ggml_backend_reg_get_proc_address(ggml.ggml_backend_reg_by_name(b"RPC"), name)
    if not address:
        raise ConfigError(f"this build of llama.cpp has no {name.decode()}")
    return ctypes.CFUNCTYPE(result, *arguments)(address)


# -- the side of the server --------------------------------------------------------------------------------------------


def connect_workers(endpoints: Sequence[str]) -> None:
    """Add the devices of the workers at ``endpoints`` (host:port) to those of this process, for as long as it lives.

    Raises ConfigError for one that cannot be reached, serves another server, or is of another release.
    """
    for endpoint in endpoints:
        address = _greet(endpoint)
        _connect(endpoint)
        _when_aborted(_lose)
        links.add(endpoint, address)


def _greet(endpoint: str) -> tuple[str, int]:
    """The IPv4 address of the worker at ``endpoint``, which is free and of this release. Raises ConfigError."""
    host, _, port = endpoint.rpartition(":")
    try:
        found = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)[0][4]
        address = str(found[0]), int(found[1])
        if other := links.known(address):
            raise ConfigError(f"--rpc: {endpoint} and {other} are the same worker")
        with socket.create_connection(address, HELLO_SECONDS) as sock:
            sock.sendall(struct.pack(f"<BQ{CAPABILITIES}x", HELLO, CAPABILITIES))
            size = struct.unpack("<Q", _received(sock, 8))[0]
            version = tuple(_received(sock, 4)[:3]) if size == 4 + CAPABILITIES else ()
    except TimeoutError as error:
        raise ConfigError(f"--rpc: cannot use the worker {endpoint}: {NO_ANSWER}") from error
    except OSError as error:
        raise ConfigError(f"--rpc: cannot reach the worker {endpoint}: {error.strerror or error}") from error
    if version != PROTOCOL:
        spoken = f"protocol {'.'.join(map(str, version))}" if version else "another protocol"
        wanted = ".".join(map(str, PROTOCOL))
        raise ConfigError(
            f"--rpc: the worker {endpoint} speaks {spoken}, this llama.cpp {wanted}: both need the same release"
        )
    return address


def _connect(endpoint: str) -> None:
    """Register the devices of the worker at ``endpoint``, which another server may have taken since it was greeted.

    Raises ConfigError. The library's calls have no time limit and abort the process, so they run on a thread of their
    own, which after an error never ends.
    """
    ggml, outcomes = _backend(), queue.SimpleQueue[str]()

    def run() -> None:
        add = _function(b"ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
        if registry := add(endpoint.encode()):
            ggml.ggml_backend_register(registry)
            # A backend keeps the one connection of the process, also while no model is loaded.
            ggml.ggml_backend_dev_init(ggml.ggml_backend_reg_dev_get(registry, 0), None)
        outcomes.put("" if registry else "it has no devices")

    def abort(message: bytes) -> None:
        if OWN_SOURCE in message:
            outcomes.put("it has closed the connection")
            threading.Event().wait()
        _lose(message)

    _when_aborted(abort)
    threading.Thread(target=run, name="pyctl-rpc", daemon=True).start()
    try:
        mistake = outcomes.get(timeout=HELLO_SECONDS)
    except queue.Empty:
        mistake = NO_ANSWER
    if mistake:
        raise ConfigError(f"--rpc: cannot use the worker {endpoint}: {mistake}")


def _received(sock: socket.socket, n: int) -> bytes:
    """The next ``n`` bytes. OSError if the connection ends before."""
    data = b""
    while len(data) < n:
        if not (part := sock.recv(n - len(data))):
            raise ConnectionResetError("it has closed the connection")
        data += part
    return data


def _lose(message: bytes) -> None:
    if OWN_SOURCE in message:
        links.end()
    print(message.decode("utf-8", "replace"), file=sys.stderr, flush=True)  # a defect: abort() follows


_kept: list[Any] = []


def _when_aborted(function: Callable[[bytes], None]) -> None:
    """Have ``function`` called on the thread on which ggml is about to abort the process."""
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(function)
    _kept.append(callback)
    _backend().ggml_set_abort_callback(callback)


# -- the side of the worker --------------------------------------------------------------------------------------------


def start_worker(
    address: tuple[str, int],
    devices: Sequence[Device],
    n_threads: int,
    cache_dir: Path | None,
    ended: Callable[[], None],
) -> int:
    """Lend ``devices`` at the IPv4 ``address`` to one server after the other, on a thread; returns the port.

    Port 0 is any free one. ``cache_dir`` keeps large tensors of weights. ``ended`` is called if that ends, also by an
    abort of ggml. Raises ConfigError if the address cannot be had.
    """
    host = address[0]
    try:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(address)
            port = int(free.getsockname()[1])
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{address[1]}: {getattr(error, 'strerror', '') or error}") from error
    pointer, size = ctypes.c_char_p, ctypes.c_size_t
    handles = (ctypes.c_void_p * len(devices))(*(device.handle for device in devices))
    start = _function(b"ggml_backend_rpc_start_server", None, pointer, pointer, size, size, ctypes.c_void_p)
    directory = str(cache_dir).encode() if cache_dir is not None else None

    def abort(message: bytes) -> None:
        print(message.decode("utf-8", "replace"), file=sys.stderr, flush=True)
        ended()

    def run() -> None:
        start(f"{host}:{port}".encode(), directory, n_threads, len(devices), ctypes.addressof(handles))
        ended()

    _when_aborted(abort)
    thread = threading.Thread(target=run, name="pyctl-worker", daemon=True)
    thread.start()
    while thread.is_alive() and not (listening := sockets_at(name=(host, port))):
        time.sleep(0.01)
    if not thread.is_alive():
        raise ConfigError(f"cannot listen on {host}:{port}")
    for descriptor in listening:
        with contextlib.suppress(OSError):
            keep_alive(descriptor)
    return port
