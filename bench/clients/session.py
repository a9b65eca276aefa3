"""A session of a program: its turns on a server with a tiny model, and the requests it sent."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.clients.programs import CLIENTS, PROGRAMS, Program, write_words_model
from bench.clients.recording_proxy import Recorded, recording_proxy
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess, clean_environment
from pyctl.processes.module_command import module_command

__all__ = ["Taken", "environment_of", "take_turns"]

SERVER = ("-c", "65536", "-np", "4", "-n", "64")

TURN_SECONDS = 600
"""The maximum duration of a turn: a program evaluates up to 40,000 tokens."""


@dataclass(frozen=True)
class Taken:
    """A turn that was taken: its name, and the requests of the program, in order."""

    name: str
    requests: tuple[Recorded, ...]


def take_turns(name: str, directory: Path, n_turns: int) -> Iterator[Taken]:
    """Yield the first ``n_turns`` of the session of the program ``name``, whose home is
    ``directory``. Raises RuntimeError if the program fails.
    """
    program = PROGRAMS[name]
    project = directory / "project"
    project.mkdir()
    model = write_words_model(directory / "words.gguf")
    disk = ("--kv-cache-dir", str(directory / "kv"))
    command = (*PYCTL_SERVE, *model, *SERVER, *disk)
    server = ServerProcess(
        command,
        directory / "log",
        timeout=TURN_SECONDS,
        environment={"PYCTL_KV_CACHE": "on"},
    )
    environment = environment_of(program, directory)
    with server, recording_proxy(server.url, program.binding) as proxy:
        for turn in program.turns[:n_turns]:
            if turn.restarts:
                server.stop()
                server.start()
                proxy.target = server.url
            before = len(proxy.recorded)
            launch = (*module_command("pyctl"), "launch", name, "--url", proxy.url, "--")
            done = subprocess.run(
                [*launch, *turn.arguments, turn.prompt],
                cwd=project,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TURN_SECONDS,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stdout}\n{done.stderr}")
            yield Taken(turn.name, tuple(proxy.recorded[before:]))


def environment_of(program: Program, home: Path) -> dict[str, str]:
    """Return the environment of a user's first day: no settings of any program."""
    kept = {
        name: value for name, value in clean_environment().items() if not name.startswith("XDG_")
    }
    places = f"{CLIENTS / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}"
    return {**kept, **program.environment, "HOME": str(home), "PATH": places, "TZ": "UTC"}
