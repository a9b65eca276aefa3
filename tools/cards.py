"""python -m tools.cards: write the table of docs/cards.md, a row per file in bench/cards, which is
the JSON of `pyctl bench --share`.
"""

from __future__ import annotations

import json
from pathlib import Path

from tools.figures import ROOT, table

PAGE = ROOT / "docs" / "cards.md"
COLUMNS = (
    "device",
    "model, flags",
    "driver",
    "pyctl, date",
    "prompt",
    "prompt/s",
    "reply/s",
    "next turn, ms",
    "VRAM, MiB",
)
SHOWN = (("prefill", "rate"), ("decode", "rate"), ("next turn", "first_ms"), ("memory", "vram_mib"))
"""The kind or way of the records that the last columns show, and their field."""


def row(path: Path) -> list[str]:
    """Return the cells of a run: its figures at the deepest prompt, "" for one that it lacks."""
    run = json.loads(path.read_text(encoding="utf-8"))
    depth = max(record.get("depth", 0) for record in run["records"])
    ours = [
        each
        for each in run["records"]
        if each.get("server") == "pyctl" and each.get("depth", depth) == depth
    ]
    found = {each.get("way", each["kind"]): each for each in ours}
    device = " + ".join(run["cards"]) or run["cpu"]
    version = f"{run['pyctl']} ({run['commit']})" if run["commit"] else run["pyctl"]
    flags = " ".join(run["flags"][1:])
    figures = [found.get(kind, {}).get(field) for kind, field in SHOWN]
    cells = ["" if figure is None else f"{figure:,.0f}" for figure in figures]
    origin = f"{version}, {run['began']}"
    return [device, f"`{flags}`", run["driver"], origin, f"{depth:,}", *cells]


def written(text: str) -> str:
    """Return ``text`` of the page with its last part, the table, written anew."""
    lines = table(COLUMNS, map(row, sorted(ROOT.glob("bench/cards/*.json"))))
    return text.partition(f"| {COLUMNS[0]} |")[0] + "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
