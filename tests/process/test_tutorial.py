"""docs/tutorial.md: each command runs on a tiny model, and prints the lines that the page expects.

A server on this machine answers as huggingface.co does, with a tiny model in place of the 27B;
`claude` is a program that sends two turns. `sudo apt install` is not run: tests/unit/test_docs.py
compares its packages with README's.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.process.conftest import clean_environment, free_port
from tests.process.model_files.test_hub import REPOS, Hub
from tests.web_server import web_server

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
PATIENCE = 120
"""Seconds after which an expected line is missing."""

REPOSITORY = "unsloth/Qwen3.6-27B-MTP-GGUF"
SERVE = "pyctl serve"
DIRECTORIES = ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "HF_HOME", "PYCTL_KV_CACHE")
"""Variables that would replace the directories of a new home, and the disk cache there."""

PYCTL = f"""#!/bin/sh
exec {sys.executable} -m pyctl "$@"
"""

CLAUDE = f"""#!{sys.executable}
import json, os, urllib.request as web
messages = [{{"role": "user", "content": "List the files of this project. " * 20}}]
for question in ("Which one is the largest?", ""):
    body = {{"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 8, "messages": messages}}
    headers = {{"content-type": "application/json"}}
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    web.urlopen(web.Request(url, json.dumps(body).encode(), headers), timeout=60).read()
    messages += [
        {{"role": "assistant", "content": "Two."}},
        {{"role": "user", "content": question}},
    ]
"""


class Step(NamedTuple):
    """A command of the page, or lines that it expects next."""

    kind: str
    text: str


def steps() -> list[Step]:
    """Return the commands and the expected lines of the page, in its order."""
    found = []
    for kind, block in re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        found += [Step(kind, line) for line in lines]
    return found


def pattern_of(line: str) -> re.Pattern[str]:
    """Return the pattern of an expected line: any digits for digits, any text for `...`, any
    blanks for blanks. A long reply moves a prompt from the device to RAM.
    """
    parts = re.split(r"(\.\.\.|\b(?:live|RAM)\b|\d[\d,.]*|\s+)", line.strip())
    wild = {"...": ".*", "live": "(live|RAM)", "RAM": "(live|RAM)"}
    pattern = ""
    for part in parts:
        if re.fullmatch(r"\d[\d,.]*", part):
            pattern += r"\d[\d,.]*"
        elif part.isspace():
            pattern += r"\s+"
        else:
            pattern += wild.get(part, re.escape(part))
    return re.compile(pattern)


class Machine:
    """The machine of the reader: its home, its two terminals, and their output. The server runs in
    the first; the second stays in the directory that the last command entered.
    """

    def __init__(self, directory: Path, environment: dict[str, str], port: int) -> None:
        self._directory = directory
        self._environment = environment
        self._port = port
        self._entered = directory
        self._log = directory / "server.log"
        self._log.touch()
        self._n_seen = 0
        self._printed = ""
        self._server: subprocess.Popen[bytes] | None = None

    def run(self, line: str) -> None:
        """Run a command; one that serves goes on in the background, after the one before ended."""
        command = line.replace("8080", str(self._port))
        if command.startswith(SERVE):
            self.stop()
            self._start(command)
            return
        left = self._directory / "left"
        done = subprocess.run(
            ["bash", "-ec", f"{command}\npwd > {left}"],
            cwd=self._entered,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        self._entered = Path(left.read_text(encoding="utf-8").strip())
        self._printed += done.stdout + done.stderr

    def forget_output(self) -> None:
        """Expect later lines in later output only."""
        self._n_seen = len(self._log.read_text(encoding="utf-8"))
        self._printed = ""

    def expect(self, line: str) -> None:
        """Wait until the output since `forget_output` has the line."""
        pattern = pattern_of(line.replace("8080", str(self._port)))
        deadline = time.monotonic() + PATIENCE
        while not pattern.search(self._new_output()):
            assert time.monotonic() < deadline, f"no line {line!r} in:\n{self._new_output()}"
            time.sleep(0.02)

    def stop(self) -> None:
        """Press Ctrl-C in the server's terminal, and wait for its end."""
        if self._server is None:
            return
        self._server.send_signal(signal.SIGINT)
        assert self._server.wait(60) == 0
        self._server = None

    def kill(self) -> None:
        """End a server that a failed test left."""
        if self._server is not None:
            self._server.kill()
            self._server.wait(60)

    def _new_output(self) -> str:
        return self._printed + self._log.read_text(encoding="utf-8")[self._n_seen :]

    def _start(self, command: str) -> None:
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self._directory,
                env=self._environment,
                stdout=log,
                stderr=log,
            )
        self.expect("ready in 1 s")


@pytest.fixture
def machine(
    tmp_path: Path, model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machine]:
    """Return a machine with an empty home, on which `pyctl` is this checkout's."""
    tiny = model_path("tiny-hybrid").read_bytes()
    monkeypatch.setitem(REPOS, REPOSITORY, {"Qwen3.6-27B-Q4_K_M.gguf": tiny})
    monkeypatch.setattr(Hub, "seen", [], raising=False)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"pyctl": PYCTL, "claude": CLAUDE}.items():
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    port = free_port()
    with web_server(Hub) as hub:
        environment = clean_environment() | {
            "HOME": str(home),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": hub,
            "LLAMA_ARG_PORT": str(port),
            "LLAMA_ARG_CTX_SIZE": "16384",
            "LLAMA_ARG_THREADS": "1",
            "LLAMA_ARG_N_PREDICT": "16",
        }
        for name in DIRECTORIES:
            environment.pop(name, None)
        reader = Machine(tmp_path, environment, port)
        try:
            yield reader
        finally:
            reader.kill()


def set_up_lines(directory: Path) -> list[str]:
    """Return what stands for the lines of the page that install: a clone of this checkout, whose
    `make demo` finds everything built.
    """
    stamps = [f"{name}={directory / name}" for name in ("BUILT", "INSTALLED", "SET_UP")]
    for stamp in stamps:
        Path(stamp.partition("=")[2]).touch()
    bin_directory = Path(sys.executable).parent
    return [
        f"git clone -q {ROOT} pyctl",
        f"touch {directory}/BUILT {directory}/INSTALLED {directory}/SET_UP",
        f"make -C pyctl demo BIN={bin_directory} {' '.join(stamps)}",
    ]


def test_each_line_of_the_tutorial_works(machine: Machine, tmp_path: Path) -> None:
    """Each command ends well, and each expected line is printed after it. The restart is the second
    `pyctl serve`: Ctrl-C in the first terminal precedes it.
    """
    substitutes = iter(set_up_lines(tmp_path))
    n_serving = 0
    earlier = "text"
    for kind, line in steps():
        if (earlier, kind) == ("text", "sh"):
            machine.forget_output()
        earlier = kind
        if kind == "text" and line.startswith("stopped"):
            machine.stop()
        if kind == "text":
            machine.expect(line)
        elif line.startswith(("sudo apt ", "export PATH")):
            continue
        elif line.startswith("git clone"):
            machine.run(next(substitutes))
        elif line.startswith("make -C pyctl demo"):
            machine.run(next(substitutes))
            machine.run(next(substitutes))
        else:
            n_serving += line.startswith(SERVE)
            machine.run(line)
    machine.stop()
    assert n_serving == 2
    assert next(substitutes, None) is None


def test_the_pattern_of_a_line_compares_words_and_not_numbers() -> None:
    pattern = pattern_of("chat  1,282 tokens  ... from live")
    assert pattern.search("12:00 chat      7 tokens        5 from live")
    assert not pattern.search("12:00 chat      7 tokens        5 from disk")
