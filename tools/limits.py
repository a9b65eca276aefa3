"""Writes docs/limits.md: every limit of the program, from where it is declared.

python -m tools.limits
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, get_args

import pyctl
from pyctl.limit import LIMITS, LimitKind, SetLimit

__all__ = ["main", "table"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "limits.md"

HEAD = """# Limits

Everything that a client, a file or a long life could make grow has a bound.
`python -m tools.limits` writes this page from the code.
A flag changes a limit; limits without a flag are constants.
"""

TITLES = {
    "request": "A request",
    "reply": "A reply",
    "connection": "Connections",
    "memory": "What stays in memory",
    "disk": "What lies on disk",
    "process": "The process",
}


class _Row(NamedTuple):
    kind: str
    what: str
    default: str
    flag: str
    effect: str


def modules() -> Iterator[ModuleType]:
    """All modules of the package that are Python, imported."""
    for found in pkgutil.walk_packages(pyctl.__path__, "pyctl."):
        if not found.name.rpartition(".")[2].startswith("_"):
            yield importlib.import_module(found.name)


def _amount(value: object, unit: str) -> str:
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
    for owner in vars(module).values():
        if not (isinstance(owner, type) and is_dataclass(owner)) or owner.__module__ != module.__name__:
            continue
        for item in fields(owner):
            bound = item.metadata.get("limit")
            if isinstance(bound, SetLimit):
                flag = item.metadata["flags"][0]
                shown = _amount(item.default, bound.unit) if bound.unit else flag.default or str(item.default)
                names = ", ".join(f"`{name}`" for name in flag.names.split())
                yield _Row(bound.kind, bound.what, shown, names, bound.effect)


def table() -> str:
    """The page."""
    rows = [row for module in modules() for row in _set_limits(module)]
    rows += [_Row(each.kind, each.what, _amount(each.value, each.unit), "", each.effect) for each in LIMITS]
    parts = [HEAD]
    for kind in get_args(LimitKind):
        chosen = sorted({row for row in rows if row.kind == kind})
        if chosen:
            parts.append(f"\n## {TITLES[kind]}\n\n| limit | default | flag | beyond it |\n|---|---|---|---|\n")
            parts += [f"| {row.what} | {row.default} | {row.flag} | {row.effect} |\n" for row in chosen]
    return "".join(parts)


def main() -> None:
    PAGE.write_text(table(), encoding="utf-8")


if __name__ == "__main__":
    main()
