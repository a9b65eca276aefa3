"""Recorded sessions in many households side by side, each on real servers of its own.

    python -m bench.traces.parallel --llama-server FILE --jobs 16 --seconds 480 --keep
    python -m bench.traces.parallel --only 24 21 --events restart --servers pyctl

The sessions are each 14th of those with a request that fits into --max-context, chosen by nothing
but their number. A household has three of them, which take turns as in bench.traces.servers. It
runs once for each event and server: with an empty cache directory, on a free port, and with one
thread. The events are a restart after half of the requests, five requests to another model after a
third, and a second client that sends each eleventh request (bench/traces/schedule.py).

After --seconds no further request begins. The tables have the requests that all servers answered:
of each household as many of its first ones as the server that answered fewest. Seconds are the
client's, while the households share the cores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from enum import Enum
from multiprocessing import get_context
from pathlib import Path

import httpx

from bench.common import parse, parser_of, show
from bench.traces.chat_tables import (
    KIND_COLUMNS,
    REASON_COLUMNS,
    WORST_COLUMNS,
    rows_by_kind,
    rows_by_reason,
    worst_rows,
)
from bench.traces.recording import Session, read_sessions
from bench.traces.schedule import Step, Turn, schedule, turns_of
from bench.traces.served_chats import ChatReplay, ServedChat
from bench.traces.targets import LLAMA_SERVER, MAX_CONTEXT, PYCTL, StartSettings, started

EVERY = 14
"""Sessions from one that is replayed to the next: 42 of the 575 with a request that fits."""


class HouseholdEvent(Enum):
    """Something that happens in between to each household of a run."""

    RESTART = "restart"
    SWITCH = "switch"
    SECOND_CLIENT = "second-client"


TITLES = {
    HouseholdEvent.RESTART: "a restart",
    HouseholdEvent.SWITCH: "a switch of models",
    HouseholdEvent.SECOND_CLIENT: "a second client",
}
"""The events in the titles of the tables."""


@dataclass(frozen=True)
class Run:
    """A household on one server, with one event.

    Attributes:
        number: The number of the household, from 0.
        sessions: Its sessions.
        event: The event in between.
        server: The server's name.
        place: The place of the server in the tables.
    """

    number: int
    sessions: Sequence[Session]
    event: HouseholdEvent
    server: str
    place: int = 0

    def steps(self, max_context: int) -> list[Step]:
        """Return the requests with the event in between, the same for each server."""
        return schedule(
            turns_of(self.sessions, len(self.sessions), max_context),
            restart=self.event is HouseholdEvent.RESTART,
            switch=self.event is HouseholdEvent.SWITCH,
            second_client=self.event is HouseholdEvent.SECOND_CLIENT,
        )


@dataclass(frozen=True)
class RunResult:
    """The answers to a household.

    Attributes:
        run: The household, the event and the server.
        n_steps: Requests that are sent if the time suffices.
        chats: Those that were answered, in their order.
        error: The error that ended the run; empty without one.
    """

    run: Run
    n_steps: int
    chats: Sequence[ServedChat]
    error: str = ""


@dataclass(frozen=True)
class EventResult:
    """The answers of all households with one event.

    Attributes:
        chats: For each server the requests that all servers answered, the same ones.
        n_households: Households.
        n_whole: Households of which all servers answered each request.
        n_steps: Requests of all households.
    """

    chats: Mapping[str, Sequence[ServedChat]]
    n_households: int
    n_whole: int
    n_steps: int

    @property
    def n_answered(self) -> int:
        """Requests that all servers answered."""
        return min(len(chats) for chats in self.chats.values())

    @property
    def n_sessions(self) -> int:
        """Recorded sessions with a request that all servers answered."""
        chats = next(iter(self.chats.values()))
        return len({chat.turn.session.number for chat in chats if chat.turn.session.number > 0})


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table of all events, and for each the requests by kind, by reason, and the worst."""
    options = _options(argv)
    deadline = time.monotonic() + options.seconds
    runs = runs_of(_households(options), options.events, options.servers, options.max_context)
    settings = StartSettings(
        scale=options.scale,
        max_context=options.max_context,
        flags=options.flags,
        llama_server=options.llama_server or "",
        file=options.file,
    )
    results = list(_run_all(runs, settings, deadline, options.jobs))
    _show(merged(results), results, options)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options in ``argv``; ends the program if they do not fit together."""
    parser = parser_of(__doc__)
    parser.add_argument("--llama-server", metavar="FILE", help="the program of llama-server")
    parser.add_argument(
        "--servers", nargs="+", choices=(PYCTL, LLAMA_SERVER), default=[PYCTL, LLAMA_SERVER]
    )
    parser.add_argument("--events", nargs="+", type=HouseholdEvent, default=list(HouseholdEvent))
    parser.add_argument("--jobs", type=int, default=2, help="households that run at a time")
    parser.add_argument("--seconds", type=float, default=480.0, help="no request begins later")
    parser.add_argument("--every", type=int, default=EVERY, help="sessions from one to the next")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="sessions by their number")
    parser.add_argument("--at-once", type=int, default=3, help="sessions of a household")
    parser.add_argument(
        "--scale", type=float, default=1 / 16, help="tokens for each recorded token"
    )
    parser.add_argument(
        "--max-context", type=int, default=MAX_CONTEXT, help="recorded tokens of a request"
    )
    parser.add_argument("--flags", default="-t 1", help="more flags of the servers")
    parser.add_argument("-m", dest="file", type=Path, metavar="FILE", help="other weights")
    options = parse(parser, argv, servers=[PYCTL], only=[24, 21], scale=1 / 64)
    if LLAMA_SERVER in options.servers and not options.llama_server:
        parser.error("llama-server needs --llama-server FILE; or give --servers pyctl")
    for name in ("jobs", "every", "at_once"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def _households(options: argparse.Namespace) -> list[list[Session]]:
    """Return the sessions of each household; SystemExit for an unknown number."""
    sessions = read_sessions()
    fitting = [each for each in sessions if n_fitting(each, options.max_context)]
    chosen = fitting[:: options.every]
    if options.only is not None:
        by_number = {session.number: session for session in sessions}
        if unknown := set(options.only) - set(by_number):
            raise SystemExit(f"no session {', '.join(map(str, sorted(unknown)))} is recorded")
        chosen = [by_number[number] for number in options.only]
    size = options.at_once
    return [chosen[first : first + size] for first in range(0, len(chosen), size)]


def n_fitting(session: Session, max_context: int) -> int:
    """Return the number of requests of ``session`` that fit into ``max_context`` tokens."""
    return sum(each.n_prompt + each.n_reply <= max_context for each in session.requests)


def runs_of(
    households: Sequence[Sequence[Session]],
    events: Sequence[HouseholdEvent],
    servers: Sequence[str],
    max_context: int = MAX_CONTEXT,
) -> list[Run]:
    """Return the runs in the order of their start: event by event, the longest household first, and
    the servers of a household one after the other.
    """
    numbered = sorted(enumerate(households), key=lambda item: -_n_tokens(item[1], max_context))
    return [
        Run(number, sessions, event, server, place)
        for event in events
        for number, sessions in numbered
        for place, server in enumerate(servers)
    ]


def _n_tokens(sessions: Sequence[Session], max_context: int) -> int:
    """Return the prompt tokens of a household, by which its seconds grow."""
    return sum(
        request.n_prompt
        for session in sessions
        for request in session.requests
        if request.n_prompt + request.n_reply <= max_context
    )


def _run_all(
    runs: Sequence[Run], settings: StartSettings, deadline: float, n_jobs: int
) -> Iterator[RunResult]:
    """Yield each run as it ends, ``n_jobs`` at a time; prints a line for each."""
    # New processes: a copy of this one would have its threads' locks.
    with ProcessPoolExecutor(n_jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run_household, run, settings, deadline) for run in runs]
        for number, future in enumerate(as_completed(futures), 1):
            result = future.result()
            run = result.run
            print(
                f"{number} of {len(runs)}: household {run.number}, {run.event.value}, "
                f"{run.server}: {len(result.chats)} of {result.n_steps} requests {result.error}",
                flush=True,
            )
            yield result


def run_household(run: Run, settings: StartSettings, deadline: float) -> RunResult:
    """Return the answers to ``run``, whose requests begin before ``deadline`` of the monotonic
    clock. A server that fails ends the run; the result has its error.
    """
    steps = run.steps(settings.max_context)
    n_steps = sum(isinstance(step, Turn) and step.is_sent for step in steps)
    chats: list[ServedChat] = []
    error = ""
    if time.monotonic() < deadline:
        settings = replace(settings, is_switched=run.event is HouseholdEvent.SWITCH)
        try:
            for chat in _chats(run, steps, settings):
                chats.append(chat)
                if time.monotonic() >= deadline:
                    break
        except (OSError, ValueError, httpx.HTTPError) as problem:
            error = f"{type(problem).__name__}: {problem}"
    return RunResult(run, n_steps, chats, error)


def _chats(run: Run, steps: Sequence[Step], settings: StartSettings) -> Iterator[ServedChat]:
    """Yield the answers of a server that is started for ``run``, with files that go in the end."""
    with (
        tempfile.TemporaryDirectory(prefix="pyctl-traces-") as name,
        started(run.server, settings, Path(name)) as target,
    ):
        replay = ChatReplay(
            target.model,
            settings.scale,
            other_model=target.other_model,
            restart=target.restart,
        )
        yield from replay.run(steps)


def merged(results: Sequence[RunResult]) -> dict[HouseholdEvent, EventResult]:
    """Return for each event the requests that all servers answered."""
    by_event: dict[HouseholdEvent, dict[int, list[RunResult]]] = {}
    for result in results:
        households = by_event.setdefault(result.run.event, defaultdict(list))
        households[result.run.number].append(result)
    return {event: _merged(by_event[event]) for event in HouseholdEvent if event in by_event}


def _merged(households: Mapping[int, Sequence[RunResult]]) -> EventResult:
    """Return what all servers answered, from the results of each household."""
    chats: dict[str, list[ServedChat]] = defaultdict(list)
    n_whole = 0
    n_steps = 0
    for unordered in households.values():
        results = sorted(unordered, key=lambda result: result.run.place)
        n_common = min(len(result.chats) for result in results)
        n_steps += results[0].n_steps
        n_whole += n_common == results[0].n_steps
        for result in results:
            chats[result.run.server] += result.chats[:n_common]
    return EventResult(chats, len(households), n_whole, n_steps)


def _show(
    events: Mapping[HouseholdEvent, EventResult],
    results: Sequence[RunResult],
    options: argparse.Namespace,
) -> None:
    """Print the table of all events, and three for each."""
    keep = "traces-households" if options.keep else ""
    weights = f"real, {options.file.stem}" if options.file else "random"
    n_sessions = max(event.n_sessions for event in events.values())
    title = f"{n_sessions} recorded sessions in households of {options.at_once}"
    columns = ["in between", "server", "sessions", *KIND_COLUMNS[1:]]
    rows = [row for event, result in events.items() for row in _rows_of_event(event, result)]
    show(title, columns, rows, keep=keep, notes=notes_of(events, results, options), weights=weights)
    tables = (
        ("", KIND_COLUMNS, rows_by_kind),
        (": reasons", REASON_COLUMNS, rows_by_reason),
        (": the worst", WORST_COLUMNS, worst_rows),
    )
    for event, result in events.items():
        for end, columns_of_table, rows_of in tables:
            show(
                f"With {TITLES[event]}{end}",
                ["server", *columns_of_table],
                [[name, *row] for name, chats in result.chats.items() for row in rows_of(chats)],
                keep=keep,
                is_first=False,
            )


def _rows_of_event(event: HouseholdEvent, result: EventResult) -> list[list[object]]:
    """Return a row per server with the sums over all kinds of requests."""
    return [
        [TITLES[event], name, result.n_sessions, *rows_by_kind(chats)[-1][1:]]
        for name, chats in result.chats.items()
        if chats
    ]


def notes_of(
    events: Mapping[HouseholdEvent, EventResult],
    results: Sequence[RunResult],
    options: argparse.Namespace,
) -> list[str]:
    """Return the facts that belong to the tables: scale, jobs, unanswered requests, errors."""
    notes = [
        f"Scale {options.scale:g}; {options.jobs} households at a time share the cores, each "
        f"server with {options.flags}.",
        "A household has the same requests for each server, and a server with an empty cache.",
    ]
    notes += [
        f"{TITLES[event].capitalize()}: all servers answered {result.n_answered:,} of "
        f"{result.n_steps:,} requests, and every one of {result.n_whole} of "
        f"{result.n_households} households, within {options.seconds:g} s for all events."
        for event, result in events.items()
    ]
    notes += [
        f"Household {result.run.number} with {TITLES[result.run.event]}, {result.run.server}: "
        f"ended after {len(result.chats):,} requests by {result.error}"
        for result in results
        if result.error
    ]
    return notes


if __name__ == "__main__":
    main()
