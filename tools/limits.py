"""Writes docs/limits.md: the limits that a flag sets or an HTTP status reports, from where they are
declared.

python -m tools.limits
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pyctl
from pyctl.settings.limit import LIMITS, LimitUnit, SetLimit

__all__ = ["main", "table"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "limits.md"

HEAD = """# Limits

Everything that a client, a file or time could make grow has a bound. This page has the bounds that
a flag sets and those that a client gets as an HTTP status; the others are constants next to the
code that enforces them. `python -m tools.limits` writes this page from the code.
"""


class _Row(NamedTuple):
    what: str
    default: str
    flag: str
    effect: str


def modules() -> Iterator[ModuleType]:
    """Yield each module of the package that is Python, imported."""
    for found in pkgutil.walk_packages(pyctl.__path__, "pyctl."):
        if not found.name.rpartition(".")[2].startswith("_"):
            yield importlib.import_module(found.name)


def _amount(value: object, unit: LimitUnit) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 20 s, not 20.0 s
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value)
    if unit != "bytes" or not isinstance(value, (int, float)):
        text = f"{value:,}" if isinstance(value, (int, float)) else str(value)
        return f"{text} {unit}".strip()
    for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size and value % size == 0:
            return f"{value // size:,.0f} {name}"
    return f"{value:,} bytes"


def _set_limits(module: ModuleType) -> Iterator[_Row]:
    """Yield a row for each limit that a flag sets: the fields of the module's dataclasses with a
    `SetLimit` in their metadata. Imported classes are left out, so that each is listed once.
    """
    for owner in vars(module).values():
        if (
            not (isinstance(owner, type) and is_dataclass(owner))
            or owner.__module__ != module.__name__
        ):
            continue
        for item in fields(owner):
            bound = item.metadata.get("limit")
            if isinstance(bound, SetLimit):
                flag = item.metadata["flags"][0]
                shown = (
                    _amount(item.default, bound.unit)
                    if bound.unit
                    else flag.default or str(item.default)
                )
                names = ", ".join(f"`{name}`" for name in flag.names.split())
                yield _Row(bound.what, shown, names, bound.effect)


def _section(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(cells) + " |\n" for cells in (head, *sorted(rows))]
    return "".join((f"\n## {title}\n\n", lines[0], "|---" * len(head), "|\n", *lines[1:]))


def table() -> str:
    """Return the text of the page."""
    by_flag = [row for module in modules() for row in _set_limits(module)]
    parts = [HEAD, _section("Set by a flag", ("limit", "default", "flag", "beyond it"), by_flag)]
    by_status: dict[str, list[tuple[str, ...]]] = {}
    for each in LIMITS:
        if status := re.search(r"\b[45]\d\d\b", each.effect):
            by_status.setdefault(status[0], []).append((each.what, _amount(each.value, each.unit)))
    parts += [
        _section(f"HTTP {status}", ("limit", "value"), by_status[status])
        for status in sorted(by_status)
    ]
    return "".join(parts)


def main() -> None:
    PAGE.write_text(table(), encoding="utf-8")


if __name__ == "__main__":
    main()
