"""ggml's RPC backend: devices of workers on other machines, and a worker for this one's.

The protocol has no encryption and no key, and a worker trusts its input. The client has no time
limits, and aborts the process when a connection fails. Then the thread of that call waits, while
another one saves and ends the process.
"""

from __future__ import annotations

import ctypes
import queue
import socket
import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from pyctl.errors import ConfigError
from pyctl.llama.library.device_loss import RPC_SOURCE, loss, shut_down_lost_device, when_aborted
from pyctl.llama.library.devices import Device, backend_function, ggml_library, start_backends
from pyctl.llama.library.package_library import package_library
from pyctl.settings.limit import limit

__all__ = ["connect_workers", "serve_devices"]

HELLO_SECONDS = limit(
    5.0, "a worker's connection at the start", "the program ends, exit code 2", "process", "s"
)

NO_ANSWER = "it does not answer: it serves another server, or its machine does not respond"


@cache
def _backend() -> Any:
    """ggml with its RPC backend registered. Raises ConfigError if it cannot be loaded."""
    start_backends()
    ggml = ggml_library()
    if not ggml.ggml_backend_reg_by_name(b"RPC"):
        path = package_library("ggml-rpc")
        if not ggml.ggml_backend_load(str(path).encode()):
            raise ConfigError(f"cannot load the RPC backend {path}; reinstall pyctl")
    return ggml


def _function(name: bytes, result: Any, *arguments: Any) -> Any:
    _backend()
    function = backend_function(b"RPC", name, result, *arguments)
    if function is None:
        raise ConfigError(f"this build of llama.cpp has no {name.decode()}")
    return function


def connect_workers(endpoints: Sequence[str]) -> None:
    """Add the devices of the workers at ``endpoints`` (host:port) to this process's, for as long as
    it lives.

    Raises ConfigError for one that cannot be reached, serves another server, or is of another
    release.
    """
    for endpoint in endpoints:
        _connect(endpoint)
    if endpoints:
        loss.workers = endpoints[0] if len(endpoints) == 1 else f"at one of {', '.join(endpoints)}"
        when_aborted(shut_down_lost_device)


def _connect(endpoint: str) -> None:
    """Register the devices of the worker at ``endpoint``, on a thread that never ends after an
    error.
    """
    ggml = _backend()
    outcomes = queue.SimpleQueue[str]()

    def run() -> None:
        add = _function(b"ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
        if registry := add(endpoint.encode()):
            ggml.ggml_backend_register(registry)
            # A backend keeps the one connection of the process, also while no model is loaded.
            ggml.ggml_backend_dev_init(ggml.ggml_backend_reg_dev_get(registry, 0), None)
        outcomes.put("" if registry else "it has no devices")

    def abort(message: bytes) -> None:
        if RPC_SOURCE in message:
            outcomes.put(message.decode("utf-8", "replace").strip().partition(": ")[2])
            threading.Event().wait()
        shut_down_lost_device(message)

    when_aborted(abort)
    threading.Thread(target=run, name="pyctl-rpc", daemon=True).start()
    try:
        mistake = outcomes.get(timeout=HELLO_SECONDS)
    except queue.Empty:
        mistake = NO_ANSWER
    if mistake:
        raise ConfigError(
            f"--rpc: cannot use the worker {endpoint}: {mistake}; both sides need the same release"
        )


def serve_devices(
    host: str, port: int, devices: Sequence[Device], n_threads: int
) -> tuple[int, threading.Thread]:
    """Lend ``devices`` at the IPv4 address ``host`` to one server after the other; return the port,
    and the thread that serves it.

    Port 0 is any free one. Raises ConfigError if the address cannot be used.
    """
    try:
        with socket.create_server((host, port)) as free:
            port = int(free.getsockname()[1])
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', '') or error}"
        ) from error
    pointer = ctypes.c_char_p
    size = ctypes.c_size_t
    start = _function(
        b"ggml_backend_rpc_start_server", None, pointer, pointer, size, size, ctypes.c_void_p
    )
    handles = (ctypes.c_void_p * len(devices))(*(device.handle for device in devices))

    def run() -> None:
        start(f"{host}:{port}".encode(), None, n_threads, len(devices), ctypes.addressof(handles))

    thread = threading.Thread(target=run, name="pyctl-worker", daemon=True)
    thread.start()
    while thread.is_alive():
        try:
            socket.create_connection((host, port), HELLO_SECONDS).close()
        except OSError:
            time.sleep(0.01)
        else:
            return port, thread
    raise ConfigError(f"cannot listen on {host}:{port}")
