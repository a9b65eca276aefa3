"""Recorded sessions as chats with real servers: evaluated tokens against the floor, and seconds.

    python -m bench.traces.servers --start pyctl llama-server --llama-server FILE --restart
    python -m bench.traces.servers --start pyctl --scale 0.125 --switch --second-client
    python -m bench.traces.servers --url http://localhost:8000 --scale 1 --only 15

Prompts have the recorded lengths and shared prefixes, scaled, in random words
(bench/traces/chats.py); replies are the server's. Sessions take turns by their recorded times, one
request at a time, without the pauses. The floor of a request is its tokens less those that any
earlier prompt or reply had in the same places. Requests beyond --max-context are left out.

A server that is started has tiny random weights with the 27B's ratio of state to rows, its default
flags, and as many tokens of context as --max-context scales to; pyctl has an empty cache directory.
llama-server's spacing of checkpoints is scaled, as the prompts are; pyctl's limits are not, such as
64 tokens of a reply, below which it saves no snapshot when another conversation comes. Any other
server needs an address, and reports `timings.prompt_n` or
`usage.prompt_tokens_details.cached_tokens`.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.common import parse, parser_of, show
from bench.traces.chat_server import ChatServer
from bench.traces.chat_tables import (
    KIND_COLUMNS,
    REASON_COLUMNS,
    WORST_COLUMNS,
    rows_by_kind,
    rows_by_reason,
    rows_of_all,
    worst_rows,
)
from bench.traces.recording import Session, read_sessions
from bench.traces.schedule import Step, Turn, schedule, turns_of
from bench.traces.served_chats import ChatReplay, ServedChat
from bench.traces.targets import (
    LLAMA_SERVER,
    MAX_CONTEXT,
    PYCTL,
    StartSettings,
    Target,
    started,
)

PROGRESS_EVERY = 50
"""Requests from one line of progress to the next."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables of each server: by kind of request, by reason, and the worst requests."""
    options = _options(argv)
    sessions = _sessions(options)
    turns = turns_of(sessions, options.at_once, options.max_context)
    steps = schedule(
        turns,
        restart=options.restart,
        switch=options.switch is not None,
        second_client=options.second_client,
    )
    served: dict[str, list[ServedChat]] = {}
    with tempfile.TemporaryDirectory() as name:
        for server in [*options.start, *options.url]:
            with _target(server, options, Path(name)) as target:
                replay = ChatReplay(
                    target.model,
                    options.scale,
                    other_model=target.other_model,
                    restart=target.restart,
                )
                served[target.name] = _replayed(replay, steps, target.name)
    n_left_out = sum(not turn.is_sent for turn in turns)
    _show(options, len(sessions), served, n_left_out)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options in ``argv``; ends the program if they do not fit together."""
    parser = parser_of(__doc__)
    servers = parser.add_argument_group("servers")
    servers.add_argument("--start", nargs="*", default=[], choices=(PYCTL, LLAMA_SERVER))
    servers.add_argument("--llama-server", metavar="FILE", help="the program of llama-server")
    servers.add_argument(
        "--url", nargs="*", default=[], help="addresses of servers that are running"
    )
    servers.add_argument("--model", default="", metavar="NAME", help="at --url: the model")
    servers.add_argument(
        "--fields",
        type=json.loads,
        default={},
        metavar="JSON",
        help="at --url: more fields of each request, such as '{\"ignore_eos\": true}'",
    )
    servers.add_argument(
        "-m", dest="file", type=Path, metavar="FILE", help="with --start: other weights"
    )
    servers.add_argument(
        "--flags", default="", help='with --start: more flags, such as --flags="-t 1"'
    )
    parser.add_argument("--sessions", type=int, default=3, help="the first so many, 0 = all")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="sessions by their number")
    parser.add_argument("--at-once", type=int, default=3, help="sessions that take turns")
    parser.add_argument(
        "--scale", type=float, default=1 / 32, help="tokens for each recorded token"
    )
    parser.add_argument(
        "--max-context", type=int, default=MAX_CONTEXT, help="recorded tokens of a request"
    )
    parser.add_argument("--restart", action="store_true", help="restart after half of the requests")
    parser.add_argument(
        "--switch",
        nargs="?",
        const="",
        metavar="MODEL",
        help="another model answers in between: a name at --url, with --start a file or none",
    )
    parser.add_argument(
        "--second-client", action="store_true", help="another client sends each eleventh request"
    )
    parser.add_argument("--requests", type=Path, metavar="FILE", help="write all requests as TSV")
    options = parse(parser, argv, start=[PYCTL], only=[24], scale=1 / 64, restart=True)
    if not options.start and not options.url:
        parser.error("no server: give --start or --url")
    if LLAMA_SERVER in options.start and not options.llama_server:
        parser.error("--start llama-server needs --llama-server FILE")
    if options.restart and options.url:
        parser.error("--restart needs servers of --start")
    if options.switch == "" and options.url:
        parser.error("--switch needs the name of the other model at --url")
    return options


def _sessions(options: argparse.Namespace) -> list[Session]:
    """Return the sessions of --only or --sessions; SystemExit for an unknown number."""
    sessions = read_sessions()
    if options.only is None:
        return sessions[: options.sessions or None]
    by_number = {session.number: session for session in sessions}
    if unknown := set(options.only) - set(by_number):
        raise SystemExit(f"no session {', '.join(map(str, sorted(unknown)))} is recorded")
    return [by_number[number] for number in options.only]


@contextmanager
def _target(server: str, options: argparse.Namespace, directory: Path) -> Iterator[Target]:
    """Provide the target at an address, or the one of the program ``server``, started in
    ``directory`` and stopped in the end.
    """
    if server not in (PYCTL, LLAMA_SERVER):
        other = ChatServer(server, options.switch, options.fields) if options.switch else None
        yield Target(server, ChatServer(server, options.model, options.fields), other)
        return
    settings = StartSettings(
        scale=options.scale,
        max_context=options.max_context,
        flags=options.flags,
        llama_server=options.llama_server or "",
        file=options.file,
        is_switched=options.switch is not None,
        other_file=Path(options.switch) if options.switch else None,
    )
    with started(server, settings, directory) as target:
        yield target


def _replayed(replay: ChatReplay, steps: Sequence[Step], name: str) -> list[ServedChat]:
    """Return the chats of ``steps``; prints progress."""
    n_sent = sum(isinstance(step, Turn) and step.is_sent for step in steps)
    served: list[ServedChat] = []
    for chat in replay.run(steps):
        served.append(chat)
        if len(served) % PROGRESS_EVERY == 0:
            floor = sum(each.floor for each in served)
            evaluated = sum(each.answer.n_evaluated for each in served)
            seconds = sum(each.answer.seconds for each in served)
            print(
                f"{name}: {len(served)} of {n_sent} requests, "
                f"{evaluated / floor:.3f} of the floor, {seconds:.0f} s",
                flush=True,
            )
    return served


def _show(
    options: argparse.Namespace,
    n_sessions: int,
    served: dict[str, list[ServedChat]],
    n_left_out: int,
) -> None:
    """Print the three tables with a row for each server, and write the requests to --requests."""
    weights = f"real, {options.file.stem}" if options.file else "random"
    n_requests = max(len(chats) for chats in served.values())
    title = f"{n_requests:,} requests of {n_sessions} recorded sessions, {options.at_once} at once"
    notes = [
        f"Scale {options.scale:g}; {n_left_out:,} more requests exceed {options.max_context:,} "
        "recorded tokens."
    ]
    if options.restart:
        notes.append("The server restarts after half of the requests.")
    keep = f"traces-servers-{n_sessions}" if options.keep else ""
    columns = ["server", *KIND_COLUMNS]
    show(title, columns, _per_server(served, rows_by_kind), keep=keep, notes=notes, weights=weights)
    columns = ["server", *REASON_COLUMNS]
    show("Reasons", columns, _per_server(served, rows_by_reason), keep=keep, is_first=False)
    columns = ["server", *WORST_COLUMNS]
    show("The worst", columns, _per_server(served, worst_rows), keep=keep, is_first=False)
    if options.requests is not None:
        with options.requests.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t")
            writer.writerow(["server", *WORST_COLUMNS, "seconds"])
            for name, chats in served.items():
                writer.writerows([name, *row] for row in rows_of_all(chats))


def _per_server(
    served: dict[str, list[ServedChat]],
    rows_of: Callable[[Sequence[ServedChat]], list[list[object]]],
) -> list[list[object]]:
    """Return the rows of all servers, with their names in the first column."""
    return [[name, *row] for name, chats in served.items() for row in rows_of(chats)]


if __name__ == "__main__":
    main()
