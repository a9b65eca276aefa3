"""A server process without a model, and connections to it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx

ROOT = Path(__file__).resolve().parents[3]


@contextmanager
def server(
    host: str = "127.0.0.1",
    port: int = 0,
    grace: float = 0.1,
    loading: str = "at once",
    maximum: int = 512,
    constants: Sequence[str] = (),
    files: tuple[int, int] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that serves; ``files`` are its limits of open files, soft and hard."""
    command = [
        sys.executable,
        "-m",
        "tests.unit.server.child",
        host,
        str(port),
        str(grace),
        loading,
        str(maximum),
        *constants,
    ]
    if files is not None:
        command = ["prlimit", f"--nofile={files[0]}:{files[1]}", *command]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        _, complaints = process.communicate()
    assert "Traceback" not in complaints


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def connect(address: str) -> socket.socket:
    parts = urlsplit(address)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 0), timeout=60)


@contextlib.contextmanager
def silent(address: str, count: int) -> Iterator[list[socket.socket]]:
    """Open ``count`` connections that send nothing."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connect(address)) for _ in range(count)]


def is_healthy(address: str) -> bool:
    return httpx.get(f"{address}/health", timeout=60).status_code == 200


def complaints(process: subprocess.Popen[str]) -> str:
    process.terminate()
    assert process.wait(60) == 0
    assert process.stderr is not None
    return process.stderr.read()


def closed_after(connection: socket.socket, drip: bytes = b"") -> bytes:
    """Return the bytes received until the connection is closed, while ``drip`` is sent again and
    again.
    """
    received = b""
    end = time.monotonic() + 60
    connection.settimeout(0.1)
    while time.monotonic() < end:
        with contextlib.suppress(
            ConnectionError, TimeoutError
        ):  # what came before the end is still to be read
            connection.sendall(drip)
        with contextlib.suppress(TimeoutError):
            try:
                if not (data := connection.recv(1000)):
                    return received
                received += data
            except ConnectionError:
                return received
    raise AssertionError("it is still open")
