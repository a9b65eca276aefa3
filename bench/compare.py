"""Two checkouts measured in alternation: `--against DIR` of the scripts that have `--json`.

Each measurement is a separate process, so that no version inherits memory of the other, and a busy
machine slows both. DIR is a checkout with a built extension and its own `bench`; its .venv is used
if it has one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common import show, shown
from pyctl.processes.module_command import module_command

__all__ = ["MeasurementError", "add_comparison", "compare", "measured"]

HERE = Path(__file__).resolve().parents[1]

Record = dict[str, Any]
"""Numbers by their kind; all other fields name the measurement."""


class MeasurementError(Exception):
    """A measurement failed, or measured another package."""


def add_comparison(parser: argparse.ArgumentParser) -> None:
    """Add the options of a script that can be compared."""
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="DIR",
        help="also measure this checkout, and print the ratio",
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="processes of each checkout with --against"
    )


def compare(module: str, arguments: Sequence[str], other: Path, rounds: int) -> None:
    """Print the findings of ``python -m module --json`` here and in ``other``, and their ratio, or
    MeasurementError.
    """
    runs: dict[Path, list[list[Record]]] = {HERE: [], other: []}
    for turn in range(rounds):
        for tree in (HERE, other) if turn % 2 else (other, HERE):
            runs[tree].append(measured(module, arguments, tree))
    rows = []
    for ours, theirs in zip(
        zip(*runs[HERE], strict=True), zip(*runs[other], strict=True), strict=True
    ):
        label = _label(ours[0])
        if any(_label(record) != label for record in (*ours, *theirs)):
            raise MeasurementError(
                f"not the same was measured: {label} here, {_label(theirs[0])} there"
            )
        for what in _numbers(ours[0]):
            pairs = [(mine[what], yours[what]) for mine, yours in zip(ours, theirs, strict=True)]
            here, there = (statistics.median(numbers) for numbers in zip(*pairs, strict=True))
            ratios = sorted(mine / yours for mine, yours in pairs if yours)
            spread = (
                f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
                if ratios
                else ""
            )
            rows.append([label, what, shown(there), shown(here), spread])
    columns = ["measured", "number", "there", "here", "here / there (all)"]
    show(f"{module}: here and {other}, medians of {rounds} runs each", columns, rows)


def measured(module: str, arguments: Sequence[str], tree: Path) -> list[Record]:
    """Return the findings of ``python -m module --json`` in ``tree``; MeasurementError on failure
    or of another package.
    """
    own = tree / ".venv" / "bin" / "python"
    command = [
        *module_command(module, str(own) if own.exists() else "", (str(tree),)),
        "--json",
        *arguments,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise MeasurementError(f"{' '.join(command)} failed in {tree}:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if Path(found["package"]) != (tree / "pyctl").resolve():
        raise MeasurementError(
            f"{tree} was to be measured, not {found['package']}: run `make install` there"
        )
    records: list[Record] = found["records"]
    return records


def _numbers(record: Record) -> list[str]:
    return [name for name, value in record.items() if isinstance(value, float)]


def _label(record: Record) -> str:
    return ", ".join(
        f"{value} {name}" for name, value in record.items() if not isinstance(value, float)
    )
