"""pyctl and llama-server on a CPU, row by row; exit code 1 if pyctl loses one.

    python -m bench.rows --llama-server "FILE -nr"      # models of tools/real_models.py
    python -m bench.rows --llama-server FILE -m MODEL... --repeat 9 --keep
    python -m bench.rows --llama-server FILE --rows decode-cpu prompt-cpu --flags "-t 1"
    python -m bench.rows --llama-server FILE --before "OLD/bin/pyctl serve"

In each round each server is started, answers two requests and is stopped, one server at a time and
in alternating order, so that load of the machine meets all of them. The first request is one of 64
tokens after a short prompt (decode), the second a file of Python, whose lines pyctl may evaluate
in separate batches (prompt). A figure is the median of all rounds, the ratio the median of the
ratios of the rounds: above 1 pyctl is better. A row below --least is lost.

Servers run in the real-time class where the system allows it, since others would decide the wall
times. Elsewhere these rows need a quiet machine, and are no test on a busy one. Rows of memory
and of CPU seconds per token also hold there, with `--flags "-t 1"`: several threads spin.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from bench.common import parse, parser_of, show, shown, words
from bench.real import ahead, file_of, measured, memory
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from pyctl.model_files import builtin_model
from tools.real_models import MODELS, path_of

LEAST = 0.98
"""The ratio that counts as parity: medians of rounds differ by 2 % without a reason."""

POLL_SECONDS = 0.01
"""The time between two questions whether a model is loaded: each costs the server that loads a
millisecond.
"""

Figures: TypeAlias = Mapping[str, float]
"""The figures of one server in one round, by the name of their row."""


@dataclass(frozen=True)
class Row:
    """A row of the table: a figure of both servers.

    Attributes:
        text: The figure, with its unit.
        is_rate: Whether more is better.
    """

    text: str
    is_rate: bool = False

    def ratio(self, ours: float, theirs: float) -> float:
        """Return how many times as good ``ours`` is as ``theirs``."""
        return ours / theirs if self.is_rate else theirs / ours


ROWS = {
    "start": Row("start until /health answers 200, s"),
    "start-cpu": Row("start until /health answers 200, CPU s"),
    "first": Row("start until the first reply of one token, s"),
    "memory": Row("resident after the start, MiB"),
    "memory-used": Row("resident after two requests, MiB"),
    "decode": Row("decode, tokens/s", is_rate=True),
    "decode-cpu": Row("decode, CPU ms per token"),
    "prompt": Row("prompt of lines, tokens/s", is_rate=True),
    "prompt-cpu": Row("prompt of lines, CPU ms per 1,000 characters"),
}
"""The rows by name, in the order of the table."""

UNJUDGED = ("start-cpu",)
"""Rows that are shown without a verdict unless --rows names them: pyctl spends these seconds on two
cores at once, so a user waits for half of them.
"""


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used, its threads that ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])  # utime and stime
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sizes:
    """The size of the requests: characters of the prompt of lines, tokens of the decoded reply."""

    n_characters: int
    n_tokens: int


def visit(server: ServerProcess, seed: object, sizes: Sizes) -> Figures:
    """Start ``server``, let it answer the requests of ``seed``, and stop it; return its figures."""
    started_at = time.monotonic()
    server.start()
    try:
        pid = server.pid
        figures = {
            "start": server.load_seconds,
            "start-cpu": cpu_seconds(pid),
            "memory": memory(pid),
        }
        measured(server, words(seed, 32), 1)
        figures["first"] = time.monotonic() - started_at
        used = cpu_seconds(pid)
        figures["decode"] = measured(server, words((seed, "decode"), 64), sizes.n_tokens)[1]
        figures["decode-cpu"] = 1000 * (cpu_seconds(pid) - used) / sizes.n_tokens
        used = cpu_seconds(pid)
        figures["prompt"] = measured(server, file_of(seed, sizes.n_characters), 1)[0]
        figures["prompt-cpu"] = 1e6 * (cpu_seconds(pid) - used) / sizes.n_characters
        figures["memory-used"] = memory(pid)
    finally:
        server.stop()
    return figures


def rounds(
    servers: Mapping[str, ServerProcess], repeat: int, sizes: Sizes
) -> Iterator[Mapping[str, Figures]]:
    """Yield the figures of all ``servers``, by name, of ``repeat`` rounds after one that does not
    count.
    """
    names = [*servers]
    for i in range(-1, repeat):
        # The first start compiles modules, and reads the weights from the disk.
        found = {}
        for name in names:
            with ahead(os.getpid(), []):  # a process inherits the class of the one that starts it
                found[name] = visit(servers[name], i, sizes)
        if i >= 0:
            yield found
        names.reverse()


@dataclass(frozen=True)
class Compared:
    """A figure of a server and its ratio to the reference, over all rounds.

    Attributes:
        name: The name of the row in ROWS.
        ours: The median of the server.
        ratio: The median of its ratios to the reference; above 1 it is the better one.
    """

    name: str
    ours: float
    ratio: float


def compared(found: Sequence[Mapping[str, Figures]], ours: str, theirs: str) -> list[Compared]:
    """Return the rows of the server named ``ours``, with ``theirs`` as reference, in ``found``."""
    rows = []
    for name, row in ROWS.items():
        our = [each[ours][name] for each in found]
        their = [each[theirs][name] for each in found]
        ratios = map(row.ratio, our, their)
        rows.append(Compared(name, statistics.median(our), statistics.median(ratios)))
    return rows


def lost(rows: Sequence[Compared], judged: Sequence[str], least: float) -> list[str]:
    """Return a line for each of the rows named ``judged`` whose ratio is below ``least``."""
    return [
        f"{row.name}: {row.ratio:.3f} of llama-server, and not {least}"
        for row in rows
        if row.name in judged and row.ratio < least
    ]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = parser_of(__doc__)
    real = [str(path_of(name)) for name in MODELS if path_of(name).is_file()]
    options.add_argument("-m", "--models", nargs="+", default=real or [str(builtin_model())])
    options.add_argument(
        "--llama-server", metavar="COMMAND", help="without it pyctl has no rows to lose"
    )
    options.add_argument(
        "--before", metavar="COMMAND", help="an earlier pyctl, shown without a verdict"
    )
    options.add_argument(
        "--rows",
        nargs="+",
        choices=ROWS,
        default=[name for name in ROWS if name not in UNJUDGED],
        help="rows that may not be lost; all are shown",
    )
    options.add_argument("--least", type=float, default=LEAST, help="the ratio that is not lost")
    options.add_argument("--flags", default="", help="flags of all servers")
    options.add_argument(
        "-n",
        type=int,
        nargs=2,
        default=[2400, 64],
        help="characters of the prompt, tokens of the reply",
    )
    options.add_argument("--repeat", type=int, default=7, help="rounds that count")
    return options


def servers_of(
    options: argparse.Namespace, model: str, directory: Path
) -> dict[str, ServerProcess]:
    """Return the servers of ``options`` with ``model`` by name; their logs are in ``directory``."""
    commands: dict[str, Sequence[str]] = {"pyctl": PYCTL_SERVE}
    others = {"llama-server": options.llama_server, "before": options.before}
    commands |= {name: shlex.split(command) for name, command in others.items() if command}
    flags = ["-m", model, "-c", "2048", *shlex.split(options.flags)]
    return {
        name: ServerProcess(
            [*command, *flags],
            directory / f"{name}.log",
            environment={"PYTHONDONTWRITEBYTECODE": ""},
            poll_seconds=POLL_SECONDS,
        )
        for name, command in commands.items()
    }


def main(
    argv: Sequence[str] | None = None, report: Callable[[str], object] = sys.stderr.write
) -> int:
    """Print the table of each model; return 1 if pyctl lost a judged row, which is reported."""
    options = parse(parser(), argv, models=[str(builtin_model())], n=[200, 4], repeat=1)
    problems = []
    for index, model in enumerate(options.models):
        with tempfile.TemporaryDirectory() as directory:
            servers = servers_of(options, model, Path(directory))
            found = [*rounds(servers, options.repeat, Sizes(*options.n))]
        reference = "llama-server" if options.llama_server else "pyctl"
        tables = {name: compared(found, name, reference) for name in servers}
        show(
            f"{Path(model).stem}: servers by turns on a CPU",
            ["row", *(f"{name} (ratio)" for name in servers)],
            [
                [ROWS[rows[0].name].text, *(f"{shown(row.ours)} ({row.ratio:.2f})" for row in rows)]
                for rows in zip(*tables.values(), strict=True)
            ],
            keep="rows" if options.keep else "",
            is_first=index == 0,
            weights=f"real, {', '.join(Path(each).stem for each in options.models)}",
        )
        lines = lost(tables["pyctl"], options.rows, options.least)
        problems += [f"{Path(model).stem}, {line}" for line in lines]
    for problem in problems:
        report(f"lost: {problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
