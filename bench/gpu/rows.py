"""The rows of a GPU that pyctl has lost once, on both servers; exit code 1 if it loses one.

    DIR/python -m bench.gpu.rows DIR --keep                      # every section
    DIR/python -m bench.gpu.rows DIR --sections plain texts
    python -m bench.gpu.rows --llama-server FILE --models tiny-hybrid-nextn=FILE.gguf
    --sections plain --context 4096 --prompt 300

Sections:

    plain    each model without drafts at --context: VRAM, a cold prompt, one reply, four replies
    texts    four replies with copies of the prompt: the default drafts next to those of the head
             alone, and next to llama-server's (`bench.gpu.rewriting`)
    steps    35B-A3B with drafts by chance of two tokens per step, next to a server without drafts
    agents   four agents on a card of 24,000 MiB that grow beyond its context: first tokens of the
             requests that both servers answered

The ratio is above 1 where pyctl is better. A row below its bound is lost; the bound is 0.98, or the
one in `ROWS` with the reason. DIR is prepared with --models 27b 35b-a3b 27b-nextn 35b-a3b-nextn, of
which a section needs the ones in `MODELS`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from bench.common import show, shown, words
from bench.gpu.machine import vram_mib
from bench.gpu.measure import CARD_MIB, small_card
from bench.gpu.report import OURS, PEER
from bench.gpu.rewriting import HEAD, TYPES
from bench.gpu.servers import Server, llama_server, models_of, pyctl, weights_of, window_rate
from bench.rows import Row
from pyctl.processes.module_command import module_command

__all__ = ["ROWS", "Found", "found_in_agents", "found_in_steps", "found_in_texts", "lost"]

N_REPLY = 256
N_TOGETHER = 4
"""Tokens of a reply, and replies at once."""

CHARACTERS = 480
"""Length of a short prompt."""

BATCH = (
    "larger batches than 512 tokens: 768 evaluate prompts of 27B at 1.03 times that speed, 1,024 "
)
BATCH += "those of 35B-A3B at 1.40 times"

UNEQUAL = "a reply that copies ends before the others, which are decoded in smaller batches then"

ROWS = {
    row.text: row
    for row in (
        Row("VRAM, MiB", least=0.99, reason=BATCH),
        Row("cold prompt, tokens/s", is_rate=True),
        Row("one reply, tokens/s", is_rate=True),
        Row("four replies, tokens/s", is_rate=True),
        Row("copies, four replies, tokens/s", is_rate=True, least=0.97, reason=UNEQUAL),
        Row("the same, while all are written", is_rate=True),
        Row("two tokens per step, tokens/s", is_rate=True),
        Row("first tokens, s"),
    )
}
"""The rows by their text."""

MODELS = {
    "plain": ("27b", "35b-a3b"),
    "texts": ("27b-nextn", "35b-a3b-nextn"),
    "steps": ("35b-a3b-nextn",),
    "agents": ("27b-nextn",),
}
"""The models of each section."""

SHAPES_OF_ALL = sorted({*chain.from_iterable(MODELS.values())})

TEXTS = {"27b-nextn": "JSON calls", "35b-a3b-nextn": "a file"}
"""The text of each model that its default drafts were slowest at, next to the head alone."""

HEAD_ALONE = "pyctl, head alone"
NO_DRAFTS = "pyctl, no drafts"

AGENTS = ["--cases", "4 at once, over budget", "--turns", "4", "--results-of", "3000", "12000"]
AGENTS += ["--case-budget", "180", "--budget", "400"]
"""Agents that read files: they grow to 1.6 of the context. Without a limit, a server that refuses
many requests takes minutes more.
"""


@dataclass(frozen=True)
class Found:
    """A figure of pyctl next to that of a reference.

    Attributes:
        name: The name of the row in ROWS.
        case: The model, and the reference if that is another than llama-server.
        ours: The figure of pyctl.
        theirs: The figure of the reference, in the same unit.
        note: A remark on the run, such as refused requests.
    """

    name: str
    case: str
    ours: float
    theirs: float
    note: str = ""

    @property
    def ratio(self) -> float:
        """The quality of pyctl's figure as a multiple of the reference's."""
        return ROWS[self.name].ratio(self.ours, self.theirs)

    @property
    def cells(self) -> list[str]:
        """The cells of its row."""
        figures = (shown(self.ours), shown(self.theirs), f"{self.ratio:.3f}")
        return [self.case, self.name, *figures, self.note]


def known(found: Sequence[Found]) -> list[str]:
    """Return a line for each figure that the reference wins for a reason in `ROWS`."""
    return [
        f"{each.case}, {each.name}: {each.ratio:.3f}: {ROWS[each.name].reason}"
        for each in found
        if each.ratio < 1 and ROWS[each.name].reason
    ]


def lost(found: Sequence[Found]) -> list[str]:
    """Return a line for each figure whose ratio is below the bound of its row."""
    return [
        f"{each.case}, {each.name}: {each.ratio:.3f}, and not {ROWS[each.name].least}"
        for each in found
        if each.ratio < ROWS[each.name].least
    ]


# -- sections
# --------------------------------------------------------------------------------------


def plain_figures(server: Server, n_prompt: int) -> dict[str, float]:
    """Start ``server``, and return its figures without drafts; then stop it."""
    before = vram_mib()
    figures: dict[str, float] = {}
    server.start()
    try:
        server.request([{"role": "user", "content": words("warm", CHARACTERS)}], 4)
        cold = server.request([{"role": "user", "content": words("cold", n_prompt)}], 4)
        figures["cold prompt, tokens/s"] = cold.evaluated / cold.first_ms * 1e3
        for n, name in ((1, "one reply, tokens/s"), (N_TOGETHER, "four replies, tokens/s")):
            for _ in range(2):  # the first time loads kernels
                figures[name] = _rate_of(server, n)
        after = vram_mib()
        if before is not None and after is not None:
            figures["VRAM, MiB"] = after - before
    finally:
        server.kill()
    return figures


def _rate_of(server: Server, n: int) -> float:
    """Return tokens per second of ``n`` replies at once, all together."""
    prompts = [words(f"{n} {i}", CHARACTERS) for i in range(n)]
    with ThreadPoolExecutor(n) as pool:
        replies = list(pool.map(lambda prompt: server.complete(prompt, N_REPLY), prompts))
    return window_rate(replies)


def plain(context: Context) -> Iterator[Found]:
    """Yield the figures of each model without drafts."""
    for shape, model in context.models("plain"):
        flags = ["-m", str(model), "-c", str(context.options.context), "--spec-type", "none"]
        flags += context.options.flags
        log = context.work / f"{shape}-plain"
        ours = plain_figures(pyctl(flags, None, log.with_suffix(".pyctl")), context.options.prompt)
        theirs = plain_figures(
            llama_server(context.peer, flags, log.with_suffix(".llama")), context.options.prompt
        )
        yield from (Found(name, shape, ours[name], theirs[name]) for name in ROWS if name in ours)


def texts(context: Context) -> Iterator[Found]:
    """Yield the figures of four replies with copies, for each model."""
    for shape, _ in context.models("texts"):
        text = TEXTS.get(shape, "a file")
        arguments = ["--parts", "rewriting", "--texts", text]
        yield from found_in_texts(context.records("speculative", shape, arguments), shape, text)


def found_in_texts(records: Sequence[dict[str, Any]], shape: str, text: str) -> Iterator[Found]:
    """Yield the figures of four replies with copies in ``records`` of `bench.gpu.speculative`."""
    of_text = {
        (each["server"], each["types"]): each
        for each in records
        if each["kind"] == "rewriting" and each["n_seqs"] == N_TOGETHER and each["text"] == text
    }
    ours = of_text[OURS, TYPES[OURS][0]]
    head = of_text[OURS, HEAD]
    peer = of_text[PEER, TYPES[PEER][0]]
    names = {
        "copies, four replies, tokens/s": "rate",
        "the same, while all are written": "rate_of_all",
    }
    for name, key in names.items():
        yield Found(name, f"{shape}, {text}, {HEAD_ALONE}", ours[key], head[key])
        yield Found(name, f"{shape}, {text}", ours[key], peer[key])


def steps(context: Context) -> Iterator[Found]:
    """Yield the speed at two tokens per step."""
    for shape, _ in context.models("steps"):
        arguments = ["--parts", "lengths", "--servers", OURS]
        arguments += ["--lengths", "2", "--prompt", "2048", "--n-predict", "1000"]
        yield from found_in_steps(context.records("speculative", shape, arguments), shape)


def found_in_steps(records: Sequence[dict[str, Any]], shape: str) -> Iterator[Found]:
    """Yield the speed with drafts next to that without, in ``records`` of
    `bench.gpu.speculative`.
    """
    rates = {bool(each["n_max"]): each["rate"] for each in records if each["kind"] == "speed"}
    case = f"{shape}, {NO_DRAFTS}"
    yield Found("two tokens per step, tokens/s", case, rates[True], rates[False])


def agents(context: Context) -> Iterator[Found]:
    """Yield the waits of agents on a card of 24,000 MiB."""
    for shape, _ in context.models("agents"):
        with small_card() if context.has_gpu else nullcontext():
            records = context.records("agents", shape, AGENTS)
        yield from found_in_agents(records, shape)


def found_in_agents(records: Sequence[dict[str, Any]], shape: str) -> Iterator[Found]:
    """Yield the sum of waits for first tokens in ``records`` of `bench.gpu.agents`, over the
    requests that both servers answered.

    Raises ValueError if there is no such request.
    """
    by_server = {each["server"]: each for each in records}
    ours = _waits_in(by_server[OURS])
    theirs = _waits_in(by_server[PEER])
    both = ours.keys() & theirs.keys()
    if not both:
        raise ValueError("no request was answered by both servers")
    n_all = len(ours) + by_server[OURS]["unanswered"]
    note = f"answered: {len(ours)}, {len(theirs)} of {n_all}; "
    note += f"refused: {by_server[OURS]['refused']}, {by_server[PEER]['refused']}"
    case = f"{shape}, 4 agents, {CARD_MIB:,} MiB"
    our_seconds = sum(ours[request] for request in both) / 1e3
    their_seconds = sum(theirs[request] for request in both) / 1e3
    yield Found("first tokens, s", case, our_seconds, their_seconds, note)


def _waits_in(record: dict[str, Any]) -> dict[tuple[int, int], float]:
    """Return the wait of each answered request in ms, by agent and turn."""
    return {(each["agent"], each["turn"]): each["first_ms"] for each in record.get("asked", [])}


@dataclass(frozen=True)
class Context:
    """The files and options of a run.

    Attributes:
        options: The options of the command.
        files: The file of each model by its shape.
        peer: llama-server.
        work: A directory for logs and findings.
    """

    options: argparse.Namespace
    files: dict[str, Path]
    peer: str
    work: Path

    @property
    def has_gpu(self) -> bool:
        return vram_mib() is not None

    def models(self, section: str) -> Iterator[tuple[str, Path]]:
        """Yield the models of ``section`` that the run has."""
        for shape, file in self.files.items():
            if shape in MODELS[section] or shape not in SHAPES_OF_ALL:
                yield shape, file

    def records(self, module: str, shape: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
        """Return the records that a module of bench.gpu finds with ``arguments``.

        Raises CalledProcessError if it fails.
        """
        place = self.options.directory
        command = list(module_command(f"bench.gpu.{module}"))
        if place is None:
            command += ["--llama-server", self.peer, "--models", f"{shape}={self.files[shape]}"]
        else:
            command += [str(place), "--models", shape]
        subprocess.run([*command, *arguments, "--results", str(self.work)], check=True)
        name = f"gpu-{module}-{shape}.json"
        found: list[dict[str, Any]] = json.loads((self.work / name).read_text("utf-8"))["records"]
        return found


SECTIONS: dict[str, Callable[[Context], Iterator[Found]]] = {
    "plain": plain,
    "texts": texts,
    "steps": steps,
    "agents": agents,
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("directory", type=Path, nargs="?", help="the directory of prepare.py")
    options.add_argument("--llama-server", metavar="FILE")
    options.add_argument("--models", nargs="+", metavar="SHAPE[=FILE]", default=SHAPES_OF_ALL)
    options.add_argument("--sections", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    options.add_argument("--context", type=int, default=65_536, help="tokens, of plain")
    options.add_argument("--prompt", type=int, default=8000, help="characters, of plain")
    options.add_argument("--flags", type=str.split, default=[], help="more flags of both, of plain")
    options.add_argument("--keep", action="store_true", help="write the tables to bench/results")
    options.add_argument(
        "--add", action="store_true", help="with --keep, add to the page instead of a new one"
    )
    return options


def main(
    argv: Sequence[str] | None = None, report: Callable[[str], object] = sys.stderr.write
) -> int:
    """Print a table per section; return 1 if pyctl lost a row, which is reported."""
    options = parser().parse_args(argv)
    files, peer = models_of(options)
    if peer is None:
        raise SystemExit("name --llama-server, or a directory of prepare.py that has it")
    problems = []
    with tempfile.TemporaryDirectory(prefix="rows-") as work:
        context = Context(options, files, peer, Path(work))
        for number, section in enumerate(options.sections):
            found = [*SECTIONS[section](context)]
            show(
                f"{section}: pyctl and llama-server on a GPU",
                ["case", "row", "pyctl", "reference", "ratio", "note"],
                [each.cells for each in found],
                keep="gpu-rows" if options.keep else "",
                is_first=number == 0 and not options.add,
                notes=known(found),
                weights=weights_of(next(iter(files))),
            )
            problems += lost(found)
    for problem in problems:
        report(f"lost: {problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
