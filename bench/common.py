"""Helpers of all benchmarks: options, requests that must not fail, timing, text, and tables."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import pyctl
from bench.gpu.machine import describe
from pyctl.engine.engine import Engine
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Event, Failed, Request
from pyctl.llama.library.bindings import api
from pyctl.llama.library.llama_tokenizer import LlamaTokenizer
from tools.generator import TINY_DENSE

RESULTS = Path(__file__).parent / "results"

SIMULATED = "none, simulated"
"""Weights of scripts that evaluate no model."""

WIDE_DENSE = replace(
    TINY_DENSE, name="wide-dense", num_heads=8, num_kv_heads=8, head_size=128, rope_size=128
)
"""A tiny model with 16 KiB of rows per token."""


def parser_of(description: str | None, *, keep: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options of every script, for `parse`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="smoke test: sizes too small for meaningful numbers"
    )
    if keep:
        parser.add_argument("--keep", action="store_true", help="write the tables to bench/results")
    return parser


def add_model(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add the options for the model and the threads."""
    parser.add_argument("-m", "--model", default=default)
    parser.add_argument(
        "-t", "--threads", type=int, default=-1, help="threads of llama.cpp; default: one per core"
    )


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, **quick: object
) -> argparse.Namespace:
    """Return the options in ``argv``; ``quick`` are other defaults for --quick."""
    options = parser.parse_args(argv)
    if not options.quick:
        return options
    if getattr(options, "keep", False):
        parser.error("--quick measures nothing that is worth keeping")
    parser.set_defaults(**quick)
    return parser.parse_args(argv)


def answered(engine: Engine, request: Request) -> Done:
    """Run ``request`` on ``engine`` in this thread; raises its error."""
    handle = RequestHandle(request)
    engine.submit(handle)
    while engine.step():
        pass
    return finished(handle.drain())


def finished(events: Iterable[Event]) -> Done:
    """Return the end of a reply; raises its error, or RuntimeError if it has no end."""
    last: Event | None = None
    for last in events:
        if isinstance(last, Failed):
            raise last.error
    if not isinstance(last, Done):
        raise RuntimeError(f"the reply did not end, its last event is {last}")
    return last


def tokenizer_of(file: Path | str) -> LlamaTokenizer:
    """Return the vocabulary of the model or vocabulary at ``file``, without its weights; SystemExit
    if it does not load.
    """
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(str(file).encode(), params)
    if not model:
        raise SystemExit(f"{file} does not load: a build unpacks the vocabularies of llama.cpp")
    return LlamaTokenizer(model, owns=True)


def median_seconds(function: Callable[[], object], repeat: int) -> float:
    """Return the median time of ``repeat`` calls after one that does not count."""
    function()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def words(seed: object, n: int) -> str:
    """Return ``n`` characters of text that starts differently for each seed."""
    rng = random.Random(str(seed))
    text = ""
    while len(text) < n:
        text += "".join(rng.choice("aeioubdfgklmnprst") for _ in range(rng.randint(2, 8))) + " "
    return text[:n]


def shown(number: float) -> str:
    """Return ``number`` as text: without a fraction from 100 on, else with three digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def show(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    keep: str = "",
    is_first: bool = True,
    notes: Sequence[str] = (),
    weights: str = "random",
) -> None:
    """Print one table, and ``notes`` below it; with ``keep``, also write all to results/<keep>.md:
    the first table of a page below its head, further ones at its end.
    """
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(width=140).print(table)
    print(*notes, sep="\n", end="\n" * bool(notes))
    if not keep:
        return
    head = (f"- {name}: {value}" for name, value in describe(weights).items())
    lines = [f"# {title}", "", *head, ""] if is_first else ["", f"## {title}", ""]
    lines += [*(f"- {note}" for note in notes), *[""] * bool(notes)]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---:|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{keep}.md").open("w" if is_first else "a", encoding="utf-8") as page:
        page.write("\n".join(lines) + "\n")


def tell(records: Sequence[dict[str, Any]]) -> None:
    """Print ``records`` as one line of JSON, with the path of the measured package."""
    print(
        json.dumps({"package": str(Path(pyctl.__file__).resolve().parent), "records": records}),
        flush=True,
    )
