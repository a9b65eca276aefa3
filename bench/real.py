"""Servers on real models without a GPU: start, memory, prefill, decoding and rewriting, quiet and
busy, by threads.

    python -m bench.real --llama-server "FILE -nr"  # models of tools/real_models.py
    python -m bench.real -m MODEL... -t 1 --busy 0
    python -m bench.real --spin 0 1000 300000         # pyctl with other GOMP_SPINCOUNTs

The servers take turns, so that load of the machine meets all of them. While one answers, which
takes a second or two, its threads are in the real-time class where the system allows it. With other
processes, which only count, it and they have the highest priority of the usual class instead, so
that they share the cores with little else. "Rewriting" has drafts of n-grams on, and says a file of
Python again with another name in it. Rates are the servers' own ("timings"). Memory is what the
process holds after its replies, with the mapped weights. All are medians, and in brackets, above 1
where pyctl is better, the median of pyctl's part by this server's of the same round. Compare
figures of one run only.
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

import pyctl
from bench.common import parse, parser_of, show, shown, words
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from pyctl.model_files import builtin_model
from tools.real_models import MODELS, path_of

BUSY = "while True: pass"
Commands: TypeAlias = dict[str, tuple[Sequence[str], str]]
"""Commands of servers by name, each with its GOMP_SPINCOUNT, empty for the server's own."""

FILE = Path(pyctl.__file__).parent / "measure" / "server_process.py"
"""A file of 5,900 characters that names `environ` often: the longest prompt has no more."""

LOW = os.sched_param(0)
HIGH = os.sched_param(10)


@contextlib.contextmanager
def busy(n: int) -> Iterator[list[int]]:
    """Yield the ids of ``n`` other processes that use all the time they get; they stand still but
    for `ahead`.
    """
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
    """Let ``others`` run beside ``server``, and both before all that the machine does else, where
    it allows that.
    """
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
                os.sched_setscheduler(
                    task, *((os.SCHED_FIFO, HIGH) if is_ahead else (os.SCHED_OTHER, LOW))
                )
            else:
                os.setpriority(os.PRIO_PROCESS, task, -20 if is_ahead else 0)


def measured(server: ServerProcess, prompt: str, n_predict: int) -> tuple[float, float]:
    """Return tokens per second of prefill and of decoding: one streamed reply to ``prompt``,
    greedy, of ``n_predict``.
    """
    body = {
        "prompt": prompt,
        "n_predict": n_predict,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{server.url}/completion", json=body, timeout=600) as reply:
        reply.raise_for_status()
        last = [line for line in reply.iter_lines() if line.startswith("data: {")][-1]
    found = json.loads(last.removeprefix("data: "))["timings"]
    return found["prompt_per_second"], found["predicted_per_second"]


def memory(pid: int) -> float:
    """Return MiB that the process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    return float(status.partition("VmRSS:")[2].split()[0]) / 1024


def file_of(seed: object, size: int) -> str:
    """Return a request to repeat a file of about ``size`` characters, that starts otherwise for
    each seed.
    """
    file = f"# {words(seed, 24)}\n{FILE.read_text(encoding='utf-8')[:size]}"
    return (
        f"```python\n{file}\n```\n\nThe same file, with `environ` named `variables`:\n\n```python\n"
    )


WORK = {"text": (words, ()), "rewriting": (file_of, ("--spec-type", "ngram-map-k"))}
"""Work by name: the prompt of a seed and a size, and flags."""

COLUMNS = ("start s", "memory MiB", "prefill tokens/s", "decode tokens/s")


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row per model, number of threads, work, number of other processes and server. The
    models are the real ones if their files are there, and else the built-in one.
    """
    parser = parser_of(__doc__)
    real = [str(path_of(name)) for name in MODELS if path_of(name).is_file()]
    parser.add_argument("-m", "--models", nargs="+", default=real or [str(builtin_model())])
    parser.add_argument(
        "--llama-server", nargs="+", default=[], metavar="COMMAND", help="servers beside pyctl"
    )
    parser.add_argument(
        "-t",
        "--threads",
        type=int,
        nargs="+",
        default=[-1, 1],
        help="threads; -1: the server's choice",
    )
    parser.add_argument("--work", nargs="+", default=list(WORK), choices=WORK)
    parser.add_argument(
        "--spin",
        nargs="+",
        default=[""],
        help="counts of GOMP_SPINCOUNT for pyctl; default: its own",
    )
    parser.add_argument(
        "--busy", type=int, nargs="+", default=[0, 1], help="number of other processes"
    )
    parser.add_argument(
        "-n",
        type=int,
        nargs=2,
        default=[900, 64],
        help="characters of the prompt, tokens of the reply",
    )
    parser.add_argument("--flags", default="", help="flags of all servers")
    parser.add_argument("--repeat", type=int, default=9)
    options = parse(parser, argv, models=[str(builtin_model())], threads=[1], n=[64, 4], repeat=1)
    commands: Commands = {
        f"pyctl{f', spin {spin}' * bool(spin)}": (PYCTL_SERVE, spin) for spin in options.spin
    }
    for command in map(shlex.split, options.llama_server):
        commands[Path(command[0]).name] = command, ""
    rows: list[Sequence[object]] = []
    for model in options.models:
        for threads in options.threads:
            for work in options.work:
                given = [
                    "-m",
                    model,
                    "-c",
                    "2048",
                    "-t",
                    str(threads),
                    *WORK[work][1],
                    *shlex.split(options.flags),
                ]
                rows += compared(
                    commands,
                    given,
                    options,
                    work,
                    [Path(model).stem, threads if threads > 0 else "all"],
                )
    show(
        "Servers beside each other, without a GPU",
        ["model", "threads", "work", "others", "server", *COLUMNS],
        rows,
        keep="real" if options.keep else "",
        weights=f"real, {', '.join(Path(model).stem for model in options.models)}",
    )


def compared(
    commands: Commands,
    flags: Sequence[str],
    options: argparse.Namespace,
    work: str,
    case: list[object],
) -> list[Sequence[object]]:
    """Return a row for each of ``commands``, by the number of other processes."""
    rows: list[Sequence[object]] = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: dict[str, ServerProcess] = {}
        starts: dict[str, list[float]] = {name: [] for name in commands}
        for i, (name, (command, spin)) in enumerate(commands.items()):
            more = {"PYTHONDONTWRITEBYTECODE": "", **({"GOMP_SPINCOUNT": spin} if spin else {})}
            server = ServerProcess([*command, *flags], directory / f"{i}.log", environment=more)
            servers[name] = stack.enter_context(server)
        # A first start may compile modules, all of them in a copied environment: it does not count.
        for _ in range(options.repeat // 3 + 1):
            for name, server in servers.items():
                server.stop()
                server.start()
                starts[name].append(server.load_seconds)
        for server in servers.values():
            measured(server, "warm up", 8)
        for n_busy in options.busy:
            found: dict[str, list[tuple[float, ...]]] = {name: [] for name in servers}
            with busy(n_busy) as others:
                for i in range(options.repeat):
                    prompt = WORK[work][0]((n_busy, i), options.n[0])
                    for name, server in servers.items():
                        with ahead(server.pid, others):
                            rates = measured(server, prompt, options.n[1])
                        # Reciprocals, so that more is better in all four.
                        found[name].append(
                            (1 / statistics.median(starts[name]), 1 / memory(server.pid), *rates)
                        )
            ours = next(iter(found.values()))
            for name, theirs in found.items():
                start, mib, *medians = (
                    statistics.median(column) for column in zip(*theirs, strict=True)
                )
                ratios = [
                    statistics.median(
                        our[i] / their[i] for our, their in zip(ours, theirs, strict=True)
                    )
                    for i in range(len(COLUMNS))
                ]
                cells = map(
                    "{} ({:.2f})".format, map(shown, (1 / start, 1 / mib, *medians)), ratios
                )
                rows.append([*case, work, n_busy, name, *cells])
    return rows


if __name__ == "__main__":
    main()
