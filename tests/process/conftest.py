"""Real server processes on tiny models."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pyctl import measure
from pyctl.llama.library.extension import core
from pyctl.measure.server_process import clean_environment
from tests.client import ChatReply, Client, ServerClient
from tests.unit.engine.single_precision import F32_ROWS
from tests.waiting import until

DEFAULT_FLAGS = ["--port", "0", "-c", "8192", "-t", "1", "-ub", "128"]
F32_FLAGS = ("-ctk", F32_ROWS["type_k"], "-ctv", F32_ROWS["type_v"], "-fa", F32_ROWS["flash_attn"])


@dataclass
class Server:
    """A running `pyctl serve`."""

    process: subprocess.Popen[bytes]
    url: str
    log_path: Path

    @property
    def client(self) -> ServerClient:
        """A client of the server. Cold prompts of 32,768 tokens take minutes on a busy machine."""
        return Client.to_server(self.url, timeout=900)

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> ChatReply:
        """Return the greedy reply to a conversation, of 12 tokens unless ``fields`` have another
        number.
        """
        return self.client.chat(messages, **{"max_tokens": 12, "temperature": 0, **fields})

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8")

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


def disk_cache(directory: Path, policy: str = "full") -> tuple[str, ...]:
    """Return the flags of a cache directory, and of what is written there."""
    return ("--kv-cache-dir", str(directory), "--disk-prefix-cache", policy)


def package_copy(directory: Path) -> tuple[Path, str]:
    """Return a copy of pyctl with its native modules in ``directory``, and the statements that let
    a process import it.
    """
    assert core is not None
    for place in (
        Path(measure.__file__).parents[1],
        Path(str(core.__file__)).parent,
    ):  # an editable one has two
        shutil.copytree(
            place,
            directory / "pyctl",
            ignore=shutil.ignore_patterns("__pycache__"),
            dirs_exist_ok=True,
        )
    finders = (
        "[each for each in sys.meta_path if not type(each).__module__.startswith('_editable')]"
    )
    return (
        directory / "pyctl",
        f"import sys; sys.meta_path[:] = {finders}; sys.path.insert(0, {str(directory)!r})",
    )


def pyctl(*arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the program to its end, with ``variables`` in its environment."""
    command = [sys.executable, "-m", "pyctl", *arguments]
    environment = {**clean_environment(), **variables}
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=60, env=environment
    )


def free_port() -> int:
    """Return a port of this machine that no process uses."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def lengths_on_disk(server: Server) -> list[int]:
    """Return the lengths of the snapshots in the index, also after a kill; their files were there a
    moment before.
    """
    body = server.client.get_json("/cache")
    found = [entry["n"] for entry in body["stored"]]
    nodes = body["prefixes"]
    while nodes:
        found += [node["n"] for node in nodes if "disk" in node["tiers"]]
        nodes = [child for node in nodes for child in node["children"]]
    return found


def n_on_disk(server: Server) -> int:
    return len(lengths_on_disk(server))


@pytest.fixture(scope="module")
def start(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """start("tiny-hybrid", "--exact", ...) -> a server that answers /health; "" is the built-in
    model, without `-m`.

    ``before`` is run in its process first. With ``is_f32`` replies do not depend on what was
    evaluated together.
    """
    started: list[Server] = []

    def run(name: str, *flags: str, before: str = "", is_f32: bool = False) -> Server:
        """Start a server and wait until it answers."""
        directory = tmp_path_factory.mktemp("server")
        log_path = directory / "log"
        program = ["-m", "pyctl"]
        if before:
            program = ["-c", f"{before}\nimport runpy; runpy.run_module('pyctl')"]
        model = ["-m", str(model_path(name))] if name else []
        rows = F32_FLAGS if is_f32 else ()
        command = [sys.executable, *program, "serve", *model, *DEFAULT_FLAGS, *rows, *flags]
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stderr=log, env=clean_environment())
        server = Server(process, "", log_path)
        started.append(server)
        until(
            lambda: "\n  cache  " in server.log() or process.poll() is not None
        )  # the last line of "ready in"
        assert process.poll() is None, server.log()
        (address,) = re.findall(r"\n  OpenAI +(http://\S+)/v1\n", server.log())
        server.url = str(address)
        assert server.client.get_json("/health") == {"status": "ok"}
        return server

    yield run
    for server in started:
        server.stop()
