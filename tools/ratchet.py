"""Measured numbers that may fall, but rise by 2 % at most.

`tools/house.json` has them by measure and place; `python -m tools.house --keep` lowers them to the
numbers of the day.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

__all__ = ["ROOM", "Numbers", "Rise", "changes", "keep", "load", "lowered", "rises"]

FILE = Path(__file__).with_name("house.json")

ROOM = 0.02
"""The share of the kept number by which a measure may rise, so that one change of a file, which
makes it clearer, does not have to be paid for in another.
"""

Numbers: TypeAlias = dict[str, dict[str, float]]
"""Numbers by measure and place; of all, less is better."""


@dataclass(frozen=True)
class Rise:
    """A number above the kept one by more than `ROOM`."""

    measure: str
    place: str
    kept: float | None
    """The kept number; None for a place without one, such as a new package."""
    number: float

    def __str__(self) -> str:
        place = f"{self.measure}, {self.place}"
        if self.kept is None:
            return f"{place}: {self.number:g}, and no number is kept"
        return f"{place}: {self.number:g}, and {self.kept:g} is kept"


def rises(kept: Numbers, numbers: Numbers) -> list[Rise]:
    """Return what rose by more than `ROOM`."""
    return [
        Rise(measure, place, before, number)
        for measure, place, before, number in pairs(kept, numbers)
        if before is None or number > before * (1 + ROOM)
    ]


def lowered(kept: Numbers, numbers: Numbers) -> Numbers:
    """Return the lower one of each kept and measured number.

    A place that is gone is left out, and so is one without a kept number.
    """
    lower: Numbers = {}
    for measure, place, before, number in pairs(kept, numbers):
        if before is not None:
            lower.setdefault(measure, {})[place] = min(before, number)
    return lower


def changes(numbers: Numbers, file: Path = FILE) -> list[str]:
    """Return a line for each number that differs from the one kept in ``file``."""
    return [
        f"{before if before is not None else 'new':>9} -> {number:<9g} {measure}, {place}"
        for measure, place, before, number in pairs(load(file), numbers)
        if number != before
    ]


def pairs(kept: Numbers, numbers: Numbers) -> Iterator[tuple[str, str, float | None, float]]:
    """Yield (measure, place, kept number, number) of each measured number."""
    for measure, by_place in numbers.items():
        for place, number in by_place.items():
            yield measure, place, kept.get(measure, {}).get(place), number


def load(file: Path = FILE) -> Numbers:
    """Return the numbers kept in ``file``."""
    numbers: Numbers = json.loads(file.read_text(encoding="utf-8"))
    return numbers


def keep(numbers: Numbers, file: Path = FILE) -> None:
    """Write the numbers to ``file``, one a line, in the order of their names."""
    file.write_text(json.dumps(numbers, indent=1, sort_keys=True) + "\n", encoding="utf-8")
