"""Real server processes on tiny models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest


@dataclass
class Server:
    """A running `pyctl serve`."""

    process: subprocess.Popen[bytes]
    url: str
    log_path: Path

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8")

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


def source_of(response: httpx.Response) -> str:
    """Where the prompt of a reply was restored from."""
    return response.headers["x-pyctl-cache"].partition(";")[0].removeprefix("source=")


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_ARG_", "PYCTL_"))}


@pytest.fixture(scope="module")
def start(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """start("tiny-hybrid", "--exact", ...) -> a server that answers /health; "" is the built-in model, without `-m`."""
    started: list[Server] = []

    def run(name: str, *flags: str) -> Server:
        directory = tmp_path_factory.mktemp("server")
        log_path = directory / "log"
        command = [sys.executable, "-m", "pyctl", "serve", *(["-m", str(model_path(name))] if name else [])]
        command += ["--port", "0", "-c", "8192", "-t", "1", "-ub", "128", *flags]
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stderr=log, env=clean_environment())
        server = Server(process, "", log_path)
        started.append(server)
        deadline = time.monotonic() + 30
        while " on http://" not in server.log():
            assert process.poll() is None, server.log()
            assert time.monotonic() < deadline, server.log()
            time.sleep(0.05)
        server.url = "http://" + server.log().rpartition(" on http://")[2].split()[0]
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        return server

    yield run
    for server in started:
        server.stop()
