"""Pictures of the results of measure.py: time to first token by kind of request, and the parts of a turn's time.

    python -m bench.gpu.plot                                  # bench/results/gpu-side-by-side-*.json
    python -m bench.gpu.plot FILE.json... --output DIR

Writes gpu-first-token-<shape>.svg and gpu-breakdown-<shape>.svg, with a white background for dark pages.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.gpu.report import BARE, COLD, ONE_MESSAGE, OURS, PEER, TO_HALF, first_tokens, median_of

COLOURS = {OURS: "#1f6feb", PEER: "#b0b7c0"}
PARTS = {"lookup": "#8250df", "restore": "#1a7f37", "prefill": "#1f6feb", "save": "#bf8700"}
PANELS = 3
"""Sizes of conversations in one picture, the largest."""

RESULTS = Path(__file__).resolve().parents[1] / "results"
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "pyctl", "font.family": "sans-serif", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#57606a", "text.color": "#24292f",
    "axes.labelcolor": "#24292f", "xtick.color": "#24292f", "ytick.color": "#24292f", "figure.facecolor": "white",
}  # fmt: skip


def label(ms: float) -> str:
    return f"{ms / 1e3:.1f} s" if ms >= 1000 else f"{ms:.0f} ms"


def first_token_figure(data: dict[str, Any]) -> Figure | None:
    """Bars on a logarithmic scale, a panel per size of conversation; None if nothing was measured."""
    found = first_tokens(data["records"])
    if not found:
        return None
    sizes = sorted({size for size, _, _ in found}, reverse=True)[:PANELS]
    found = [row for row in found if row[0] in sizes]
    counts = [sum(at == size for at, _, _ in found) for size in sizes]
    figure = Figure(figsize=(8, 0.34 * sum(counts) + 0.7 * len(sizes) + 0.4), layout="constrained")
    panels = figure.subplots(len(sizes), 1, sharex=True, squeeze=False, height_ratios=counts)[:, 0]
    longest = max(ms for _, _, servers in found for _, ms in servers.values())
    for panel, size in zip(panels, sizes, strict=True):
        rows = [(way, servers) for at, way, servers in found if at == size]
        for offset, name in ((-0.2, OURS), (0.2, PEER)):
            places = [i + offset for i, (_, servers) in enumerate(rows) if name in servers]
            values = [servers[name][1] for _, servers in rows if name in servers]
            bars = panel.barh(places, values, 0.38, color=COLOURS[name], label=name)
            panel.bar_label(bars, [label(value) for value in values], padding=3, fontsize=7.5)
        panel.set_yticks(range(len(rows)), [way for way, _ in rows])
        panel.invert_yaxis()
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        panel.set_title(f"conversation of {size:,} tokens", loc="left", fontsize=9, fontweight="bold")
        panel.tick_params(axis="y", length=0)
    panels[0].set_xlim(right=longest * 3)
    panels[-1].set_xlabel("milliseconds to the first token, on the client's clock")
    panels[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    figure.suptitle(caption(data), x=0.01, ha="left", fontsize=9)
    return figure


def breakdown(records: Sequence[dict[str, Any]], size: int) -> list[tuple[str, dict[str, float]]]:
    """(way, milliseconds by part) of pyctl's turns at one size, those that evaluate thousands of tokens left out."""
    rows = []
    for _, way, servers in (row for row in first_tokens(records) if row[0] == size):
        key = {"kind": "first token", "size": size, "way": way, "server": OURS}
        parts = {part: median_of(records, f"{part}_ms", **key) for part in ("lookup", "restore", "save")}
        total = median_of(records, "first_ms", **key)
        if way in (COLD, ONE_MESSAGE, BARE, TO_HALF) or OURS not in servers or total is None:
            continue
        known = {part: value for part, value in parts.items() if value is not None}
        rows.append((way, {**known, "prefill": max(total - sum(known.values()), 0.0)}))
    return rows


def breakdown_figure(data: dict[str, Any]) -> Figure | None:
    """Stacked bars of what the turns of the longest conversation are made of; None if nothing was measured."""
    sizes = {size for size, _, servers in first_tokens(data["records"]) if OURS in servers}
    rows = breakdown(data["records"], max(sizes)) if sizes else []
    if not rows:
        return None
    figure = Figure(figsize=(8, 0.32 * len(rows) + 1.3), layout="constrained")
    panel = figure.subplots()
    left = [0.0] * len(rows)
    for part, colour in PARTS.items():
        values = [parts.get(part, 0.0) for _, parts in rows]
        name = "prefill, sampling, HTTP" if part == "prefill" else part
        panel.barh(range(len(rows)), values, 0.6, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for i, total in enumerate(left):
        panel.annotate(label(total), (total, i), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7.5)
    panel.set_yticks(range(len(rows)), [way for way, _ in rows])
    panel.invert_yaxis()
    panel.tick_params(axis="y", length=0)
    panel.set_xlim(right=max(left) * 1.12)
    panel.set_xlabel(f"milliseconds to pyctl's first token, conversation of {max(sizes):,} tokens")
    panel.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False)
    figure.suptitle(caption(data), x=0.01, ha="left", fontsize=9)
    return figure


def caption(data: dict[str, Any]) -> str:
    machine = data.get("machine", {})
    device = machine.get("GPU", "none")
    return (
        f"{data['shape']} shape, random weights; {machine.get('CPU', '') if device == 'none' else device.split(',')[0]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args()
    mpl.rcParams.update(STYLE)
    for path in options.files or sorted(RESULTS.glob("gpu-side-by-side-*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        for name, figure in (("first-token", first_token_figure(data)), ("breakdown", breakdown_figure(data))):
            if figure is not None:
                target = options.output / f"gpu-{name}-{data['shape']}.{options.format}"
                # Without a date the file changes only when its content does.
                figure.savefig(target, dpi=110, metadata={"Date": None} if options.format == "svg" else None)
                print(f"{target}, {target.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
