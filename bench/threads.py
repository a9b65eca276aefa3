"""Prefill and decoding of servers without a GPU, by their number of threads, on a quiet and on a busy machine.

    python -m bench.threads                                          # the built-in model
    python -m bench.threads -m MODEL... --llama-server "FILE -nr"    # beside llama-server, without repacked weights
    python -m bench.threads -m MODEL --flags "--spec-type ngram-map-k" --repeating
    python -m bench.threads --spin 0 1000 300000                     # pyctl with other GOMP_SPINCOUNTs

The servers take turns, so that load of the machine meets all of them. While one answers, which takes a second or two,
its threads are in the real-time class where the system allows it. With other processes, which only count, it and they
have the highest priority of the usual class instead, so that they share the cores with little else. Rates are the
servers' own ("timings"), medians; the last column is the median of pyctl's rate of decoding divided by this server's in
the same round. Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import httpx

from bench.common import parse, parser_of, show, shown, words
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from pyctl.models import builtin_model

BUSY = "while True: pass"
Commands: TypeAlias = dict[str, tuple[Sequence[str], str]]
"""By name: a server's command, and its GOMP_SPINCOUNT, empty for its own."""

LOW, HIGH = os.sched_param(0), os.sched_param(10)


@contextlib.contextmanager
def busy(n: int) -> Iterator[list[int]]:
    """The ids of ``n`` other processes that take what they get; they stand still but for `ahead`."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(n)]
    try:
        for other in others:
            other.send_signal(signal.SIGSTOP)
        yield [other.pid for other in others]
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextlib.contextmanager
def ahead(server: int, others: Sequence[int]) -> Iterator[None]:
    """Let ``others`` run beside ``server``, and both before all that the machine does else, where it allows that."""
    _schedule([server, *others], quiet=not others, is_ahead=True)
    for pid in others:
        os.kill(pid, signal.SIGCONT)
    try:
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        _schedule([server, *others], quiet=not others, is_ahead=False)


def _schedule(pids: Sequence[int], *, quiet: bool, is_ahead: bool) -> None:
    for task in (int(task.name) for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()):
        with contextlib.suppress(OSError):  # it has ended, or may not
            if quiet:
                os.sched_setscheduler(task, *((os.SCHED_FIFO, HIGH) if is_ahead else (os.SCHED_OTHER, LOW)))
            else:
                os.setpriority(os.PRIO_PROCESS, task, -20 if is_ahead else 0)


def measured(server: ServerProcess, prompt: str, n_predict: int) -> tuple[float, float]:
    """Tokens per second of prefill and of decoding: one streamed reply to ``prompt``, greedy, of ``n_predict``."""
    body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/completion", json=body, timeout=600) as reply:
        reply.raise_for_status()
        last = [line for line in reply.iter_lines() if line.startswith("data: {")][-1]
    found = json.loads(last.removeprefix("data: "))["timings"]
    return found["prompt_per_second"], found["predicted_per_second"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("-m", "--models", nargs="+", default=[str(builtin_model())])
    parser.add_argument("--llama-server", nargs="+", default=[], metavar="COMMAND", help="servers beside pyctl")
    parser.add_argument(
        "-t", "--threads", type=int, nargs="+", default=[-1, 1], help="threads; -1: the server's choice"
    )
    parser.add_argument("--spin", nargs="+", default=[""], help="counts of GOMP_SPINCOUNT for pyctl; default: its own")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1], help="number of other processes")
    parser.add_argument(
        "-n", type=int, nargs=2, default=[300, 64], help="characters of the prompt, tokens of the reply"
    )
    parser.add_argument("--repeating", action="store_true", help="a prompt that says one sentence again and again")
    parser.add_argument("--flags", default="", help="flags of all servers")
    parser.add_argument("--repeat", type=int, default=9)
    options = parse(parser, argv, threads=[1], n=[64, 4], repeat=1)
    commands: Commands = {f"pyctl{f', spin {spin}' * bool(spin)}": (PYCTL_SERVE, spin) for spin in options.spin}
    for command in map(shlex.split, options.llama_server):
        commands[Path(command[0]).name] = command, ""
    rows: list[Sequence[object]] = []
    for model in options.models:
        for threads in options.threads:
            given = ["-m", model, "-c", "2048", "-t", str(threads), *shlex.split(options.flags)]
            rows += compared(commands, given, options, [Path(model).stem, threads if threads > 0 else "chosen"])
    show(
        "Threads on a quiet and on a busy machine",
        ["model", "threads", "other processes", "server", "prefill tokens/s", "decode tokens/s", "pyctl / it"],
        rows,
        keep="threads" if options.keep else "",
    )


def compared(
    commands: Commands,
    flags: Sequence[str],
    options: argparse.Namespace,
    case: list[object],
) -> list[Sequence[object]]:
    """A row for each of ``commands``, by the number of other processes."""
    rows: list[Sequence[object]] = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {}
        for i, (name, (command, spin)) in enumerate(commands.items()):
            more = {"GOMP_SPINCOUNT": spin} if spin else {}
            server = ServerProcess([*command, *flags], directory / f"{i}.log", environment=more)
            servers[name] = stack.enter_context(server)
            measured(server, "warm up", 8)
        for n_busy in options.busy:
            rates: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
            with busy(n_busy) as others:
                for i in range(options.repeat):
                    size = 40 if options.repeating else options.n[0]
                    text = words((n_busy, i), size) * (options.n[0] // size)
                    for name, server in servers.items():
                        with ahead(server.pid, others):
                            rates[name].append(measured(server, text, options.n[1]))
            ours = [decode for _, decode in next(iter(rates.values()))]
            for name, found in rates.items():
                prefill, decode = zip(*found, strict=True)
                part = statistics.median(our / their for our, their in zip(ours, decode, strict=True))
                medians = map(statistics.median, (prefill, decode))
                rows.append([*case, n_busy, name, *map(shown, medians), f"{part:.3f}"])
    return rows


if __name__ == "__main__":
    main()
