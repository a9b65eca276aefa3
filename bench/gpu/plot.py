"""Pictures of the results of measure.py: time to first token by kind of request.

    python -m bench.gpu.plot                                  # bench/results/gpu-side-by-side-*.json
    python -m bench.gpu.plot FILE.json... --output DIR

Writes gpu-first-token-<shape>.svg, with a white background for dark pages.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.gpu.report import OURS, PEER, first_tokens

COLOURS = {OURS: "#1f6feb", PEER: "#b0b7c0"}
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


def caption(data: dict[str, Any]) -> str:
    head = data["machine"]
    return f"{data['shape']} shape, {head['weights']} weights; {head['machine'].partition(',')[0]}; {head['commit']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    mpl.rcParams.update(STYLE)
    for path in options.files or sorted(RESULTS.glob("gpu-side-by-side-*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if (figure := first_token_figure(data)) is not None:
            target = options.output / f"gpu-first-token-{data['shape']}.svg"
            figure.savefig(target, metadata={"Date": None})  # so that it changes only with its content
            print(f"{target}, {target.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
