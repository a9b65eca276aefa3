"""pyctl and llama-server on a CPU, row by row; exit code 1 if pyctl loses one.

    python -m bench.rows --llama-server FILE            # models of tools/real_models.py
    python -m bench.rows --llama-server FILE -m MODEL... --repeat 9 --keep    # a file, or smollm2
    python -m bench.rows --llama-server FILE --busy --flags "-t 1"        # as CI does
    python -m bench.rows --llama-server FILE --before "OLD/bin/pyctl serve"

In each round each server is started, answers two requests and is stopped, one server at a time and
in alternating order, so that load of the machine meets all of them. The first request is one of 64
tokens after a short prompt (decode), the second a file of Python, whose lines pyctl may evaluate
in separate batches (prompt). A figure is the median of all rounds, the ratio the median of the
ratios of the rounds: above 1 pyctl is better. A row below its bound is lost. The bound is 0.98, or
the one in `ROWS` with the reason why pyctl is behind, which stands above the table.

Servers run in the real-time class where the system allows it, since others would decide the wall
times. Elsewhere these rows need a quiet machine. With --busy only rows of memory and of CPU seconds
are judged, by bounds that no other load reaches; with `--flags "-t 1"`, since several threads spin.
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
from tools.real_models import MODELS, fetch, path_of

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
    """A row of the table: a figure of both servers, and the ratios below which it is lost.

    Attributes:
        text: The figure, with its unit.
        is_rate: Whether more is better.
        least: The bound on a quiet machine.
        busy_least: The bound on a busy machine, None for a row that others decide there.
        reason: The measured reason of a bound below LEAST.
    """

    text: str
    is_rate: bool = False
    least: float = LEAST
    busy_least: float | None = None
    reason: str = ""

    def ratio(self, ours: float, theirs: float) -> float:
        """Return how many times as good ``ours`` is as ``theirs``; both values have one unit."""
        return ours / theirs if self.is_rate else theirs / ours


IMPORTS = "Python reads 840 modules in 0.33 s of CPU"
INTERPRETER = "Python, its modules and libraries take 55 MiB, empty texts of tokens 2 to 10"
STEPS = "Python takes 0.3 ms between two tokens, and 0.2 to 0.3 ms for the event of one"

BATCHES = (
    "a batch of raw text ends after 256 tokens, where edited text can resume, which takes up to 3 "
    "%; starts of one server differ by more"
)

ROWS = {
    "start": Row("start until /health answers 200, s", least=0.44, reason=IMPORTS),
    "start-cpu": Row(
        "start until /health answers 200, CPU s", least=0.36, busy_least=0.2, reason=IMPORTS
    ),
    "first": Row("start until the first reply of one token, s", least=0.52, reason=IMPORTS),
    "memory": Row("resident after the start, MiB", least=0.71, busy_least=0.68, reason=INTERPRETER),
    "memory-used": Row(
        "resident after two requests, MiB", least=0.77, busy_least=0.68, reason=INTERPRETER
    ),
    "decode": Row("decode, tokens/s", is_rate=True, least=0.90, reason=STEPS),
    "decode-cpu": Row("decode, CPU ms per token", least=0.90, busy_least=0.7, reason=STEPS),
    "prompt": Row("prompt of lines, tokens/s", is_rate=True, least=0.92, reason=BATCHES),
    "prompt-cpu": Row(
        "prompt of lines, CPU ms per 1,000 characters",
        least=0.92,
        busy_least=0.7,
        reason=BATCHES,
    ),
}
"""The rows by name, in the order of the table. Bounds with a reason are 5 % below the lowest ratio
of the three models in bench/results/rows.md.
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


def lost(rows: Sequence[Compared], bounds: Mapping[str, float]) -> list[str]:
    """Return a line for each of the rows whose ratio is below its bound in ``bounds``, by the name
    of the row, as fractions of the reference.
    """
    return [
        f"{row.name}: {row.ratio:.3f} of llama-server, and not {bounds[row.name]}"
        for row in rows
        if row.name in bounds and row.ratio < bounds[row.name]
    ]


def known(rows: Sequence[Compared]) -> list[str]:
    """Return a line for each of the rows that llama-server wins for a reason in `ROWS`."""
    return [
        f"{row.name}: {row.ratio:.2f} of llama-server: {reason}"
        for row in rows
        if row.ratio < LEAST and (reason := ROWS[row.name].reason)
    ]


def bounds_of(names: Sequence[str], *, is_busy: bool, least: float | None) -> dict[str, float]:
    """Return the bounds of the rows with these ``names``, as fractions of the reference: ``least``
    for all, None for their own. Rows that a busy machine decides have none there.
    """
    bounds = {}
    for name in names:
        row = ROWS[name]
        own = row.busy_least if is_busy else row.least
        if own is not None:
            bounds[name] = own if least is None else least
    return bounds


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = parser_of(__doc__)
    real = [str(path_of(name)) for name in MODELS if path_of(name).is_file()]
    options.add_argument(
        "-m",
        "--models",
        nargs="+",
        default=real or [str(builtin_model())],
        help=f"files, or names of real models, which are fetched: {', '.join(MODELS)}",
    )
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
        default=[*ROWS],
        help="rows that may not be lost; all are shown",
    )
    options.add_argument(
        "--busy", action="store_true", help="judge only what a busy machine does not decide"
    )
    options.add_argument("--least", type=float, help="the ratio that is not lost, for all rows")
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
    options.models = [str(fetch(name)) if name in MODELS else name for name in options.models]
    bounds = bounds_of(options.rows, is_busy=options.busy, least=options.least)
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
            notes=known(tables["pyctl"]),
            weights=f"real, {', '.join(Path(each).stem for each in options.models)}",
        )
        problems += [f"{Path(model).stem}, {line}" for line in lost(tables["pyctl"], bounds)]
    for problem in problems:
        report(f"lost: {problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
