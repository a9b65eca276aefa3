"""Claude Code and Codex in a session of several turns with tool calls, and every field they send.

    python -m bench.clients                # the programs of `make clients`: about 4 minutes
    python -m bench.clients --only codex

The server has a tiny model of random weights, whose calls are bound, so that the programs run their
tools. The second table has each field of the recorded requests once. It fails if pyctl would drop
one of them in silence, or if a request was not answered with 200.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.clients.fields import field_places, has_effect, reason_of
from bench.clients.programs import CLIENTS, PROGRAMS, Program, write_words_model
from bench.clients.recording_proxy import Recorded, recording_proxy
from bench.common import parse, parser_of, show
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess, clean_environment

SERVER = ("-c", "65536", "-np", "4", "-n", "64")

TURN_SECONDS = 600
"""The maximum duration of a turn: a program evaluates up to 40,000 tokens."""

SESSION = ("program", "version", "turn", "prompt", "cached", "evaluated")
FIELDS = ("program", "in", "read", "no effect")


@dataclass(frozen=True)
class Taken:
    """A turn that was taken: its name, and the requests of the program, in order."""

    name: str
    requests: tuple[Recorded, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sessions, print the tables, and return 1 if a field or a request was lost."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    options = parse(parser, argv)
    logging.getLogger("pyctl").setLevel(logging.ERROR)  # which warns of changed fields
    sessions: dict[str, tuple[Taken, ...]] = {}
    for name in options.only:
        if not PROGRAMS[name].version():
            print(f"{name} is not installed: make clients", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as directory:
            turns = 1 if options.quick else len(PROGRAMS[name].turns)
            sessions[name] = tuple(take_turns(name, Path(directory), turns))
    rows = [row for name, taken in sessions.items() for row in _session_rows(name, taken)]
    keep = "client-sessions" if options.keep else ""
    show("Sessions of Claude Code and Codex", SESSION, rows, keep=keep, notes=_betas(sessions))
    fields, unknown = _field_rows(sessions)
    show("Fields of their requests", FIELDS, fields, keep=keep, is_first=False)
    refused = [each for taken in sessions.values() for each in _refused(taken)]
    for lost in (*unknown, *refused):
        print(lost, file=sys.stderr)
    return 1 if unknown or refused else 0


def take_turns(name: str, directory: Path, n_turns: int) -> Iterator[Taken]:
    """Yield the first turns of the session of a program, whose home is in ``directory``."""
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
    environment = _environment(program, directory)
    with server, recording_proxy(server.url, program.binding) as proxy:
        for turn in program.turns[:n_turns]:
            if turn.restarts:
                server.stop()
                server.start()
                proxy.target = server.url
            before = len(proxy.recorded)
            launch = (sys.executable, "-m", "pyctl", "launch", name, "--url", proxy.url, "--")
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


def _environment(program: Program, home: Path) -> dict[str, str]:
    """Return the environment of a user's first day: no settings of any program."""
    kept = {
        name: value for name, value in clean_environment().items() if not name.startswith("XDG_")
    }
    places = f"{CLIENTS / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}"
    return {**kept, **program.environment, "HOME": str(home), "PATH": places, "TZ": "UTC"}


def _session_rows(name: str, taken: Sequence[Taken]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each request that generates, and one for the counts of a turn."""
    version = PROGRAMS[name].version()
    for turn in taken:
        for request in turn.requests:
            if request.n_cached is None or request.n_evaluated is None:
                continue
            n_prompt = request.n_cached + request.n_evaluated
            counts = (f"{n:,}" for n in (n_prompt, request.n_cached, request.n_evaluated))
            yield (name, version, turn.name, *counts)
        n_counted = sum(request.path.endswith("count_tokens") for request in turn.requests)
        if n_counted:
            yield (name, version, turn.name, f"{n_counted} x `count_tokens`", "", "")


def _betas(sessions: Mapping[str, Sequence[Taken]]) -> list[str]:
    """Return a line with the names in the header ``anthropic-beta``, if a program sends any."""
    names: set[str] = set()
    for request in _generations(sessions):
        names |= set(filter(None, request.headers.get("anthropic-beta", "").split(",")))
    shown = ", ".join(f"`{name}`" for name in sorted(names))
    return [f"`anthropic-beta` of Claude Code: {shown}"] if names else []


def _generations(sessions: Mapping[str, Sequence[Taken]]) -> Iterator[Recorded]:
    """Yield the requests to the endpoints of the programs."""
    for name, taken in sessions.items():
        for turn in taken:
            yield from (each for each in turn.requests if each.path == PROGRAMS[name].endpoint)


def _field_rows(
    sessions: Mapping[str, Sequence[Taken]],
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return a row for each object of the requests, and a line for each field that is dropped
    without a reason.
    """
    rows: list[tuple[str, ...]] = []
    unknown: list[str] = []
    for name, taken in sessions.items():
        endpoint = PROGRAMS[name].endpoint
        read: dict[str, list[str]] = defaultdict(list)
        without: dict[str, list[str]] = defaultdict(list)
        for field, (body, place) in _first_places(_generations({name: taken})).items():
            holder, _, member = field.rpartition(".")
            if has_effect(endpoint, body, place):
                read[holder].append(f"`{member}`")
                continue
            reason = reason_of(endpoint, field)
            without[holder].append(f"`{member}`: {reason}")
            if not reason:
                unknown.append(f"{name}: {field} is dropped without a reason")
        for holder in sorted({*read, *without}):
            shown = ", ".join(sorted(read[holder]))
            dropped = "; ".join(sorted(without[holder]))
            rows.append((name, f"`{holder}`" if holder else "the body", shown, dropped))
    return rows, unknown


def _first_places(requests: Iterator[Recorded]) -> dict[str, tuple[dict[str, Any], Any]]:
    """Return each field of the requests, with the first body that has it, and its place there."""
    found: dict[str, tuple[dict[str, Any], Any]] = {}
    for request in requests:
        body = request.body or {}
        for field, place in field_places(body).items():
            found.setdefault(field, (body, place))
    return found


def _refused(taken: Sequence[Taken]) -> Iterator[str]:
    """Yield a line for each request that was not answered with 200."""
    for turn in taken:
        for request in turn.requests:
            if request.status != 200:
                yield f"{turn.name}: {request.path} was answered with {request.status}"


if __name__ == "__main__":
    sys.exit(main())
