"""Tables in Markdown out of the records of a measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.gpu.report import OURS, PEER, Record, aims, cut_shares, disk_rates, first_tokens, ratio, speeds

__all__ = ["document"]

Row = list[str]


def _show(value: float | None, form: str = "{:.1f}") -> str:
    return "" if value is None else form.format(value)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---:|" * len(columns)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _section(title: str, text: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"## {title}", "", *([text, ""] if text else []), *_table(columns, rows)] if rows else []


def first_token_rows(records: Sequence[Record]) -> list[Row]:
    rows = []
    for size, way, servers in first_tokens(records):
        (n_ours, ours), (n_peer, peer) = servers.get(OURS, (None, None)), servers.get(PEER, (None, None))
        cells = [f"{size:,}", way, _show(n_ours, "{:,.0f}"), _show(ours, "{:,.0f}"), _show(n_peer, "{:,.0f}")]
        rows.append([*cells, _show(peer, "{:,.0f}"), _show(ratio(peer, ours), "{:.2f}x")])
    return rows


def speed_rows(records: Sequence[Record]) -> list[Row]:
    return [
        [what, _show(ours, "{:,.1f}"), _show(peer, "{:,.1f}"), _show(ratio(ours, peer), "{:.3f}")]
        for what, ours, peer in speeds(records)
    ]


def _rows(records: Sequence[Record], kind: str, cells: Callable[[Record], Row]) -> list[Row]:
    return [cells(record) for record in records if record["kind"] == kind]


def aim_rows(records: Sequence[Record]) -> list[Row]:
    return [[what, aim, found, "yes" if reached else "NO"] for what, aim, found, reached in aims(records)]


def cut_rows(records: Sequence[Record]) -> list[Row]:
    return [[f"{n:,}", f"{reported:.2%}", _show(clock, "{:.2%}")] for n, reported, clock in cut_shares(records)]


def copy_rows(records: Sequence[Record]) -> list[Row]:
    def cells(r: Record) -> Row:
        rates = [f"{r['out']:.1f} ({r['out_share']:.0%})", f"{r['back']:.1f} ({r['back_share']:.0%})"]
        return [r["what"], f"{r['tokens']:,}", f"{r['mb']:,.0f}", *rates]

    return _rows(records, "copy", cells)


def disk_rows(records: Sequence[Record]) -> list[Row]:
    return [
        [way, f"{size:,}", f"{read:.0%}", f"{rate:.2f}", _show(drive, "{:.2f}"), _show(ratio(rate, drive), "{:.0%}")]
        for way, size, read, rate, drive in disk_rates(records)
    ]


def memory_rows(records: Sequence[Record]) -> list[Row]:
    def cells(r: Record) -> Row:
        sizes = [_show(r[name], "{:,.0f}") for name in ("vram_mib", "ram_mib", "cache_mib")]
        return [r["server"], f"{r['section']}, {r['when']}", *sizes]

    return _rows(records, "memory", cells)


def kept_rows(records: Sequence[Record]) -> list[Row]:
    def cells(r: Record) -> Row:
        sizes = [f"{r['bytes'] / 1e6:,.1f}", f"{r['theory'] / 1e6:,.1f}", f"{r['ratio']:.3f}"]
        return [r["way"], f"{r['tokens']:,}", str(r["snapshots"]), *sizes]

    return _rows(records, "kept turn", cells)


def card_rows(records: Sequence[Record]) -> list[Row]:
    def cells(r: Record) -> Row:
        memory = [f"{r['limit_mib']:,.0f}", f"{r['vram_mib']:,.0f}"]
        return [r["flags"], *memory, f"{r['prompt']:,}", f"{r['first_ms'] / 1e3:,.1f}", f"{r['next_ms']:,.0f}"]

    return _rows(records, "small card", cells)


def exact_rows(records: Sequence[Record]) -> list[Row]:
    rows = []
    for record in records:
        if record["kind"] == "exact":
            rows.append([record["kv"], record["flash"], *(f"{value:.3g}" for value in record["differences"].values())])
    return rows


def document(data: dict[str, Any]) -> str:
    """All tables of one model as Markdown."""
    records = data["records"]
    lines = [f"# pyctl and llama-server side by side, {data['shape']} shape", ""]
    lines += [f"- {name}: {value}" for name, value in data.get("machine", {}).items()]
    flags = next((record["flags"] for record in records if record["kind"] == "flags"), None)
    lines += [f"- flags of both: `{flags}`"] * bool(flags) + [""]
    exact = next((list(record["differences"]) for record in records if record["kind"] == "exact"), [])
    for title, text, columns, rows in (
        ("Aims", "", ["what", "aim", "found", "reached"], aim_rows(records)),
        (
            "Time to first token",
            "Milliseconds on the client's clock, streaming, medians; tokens are those evaluated.",
            ["conversation", "way", "pyctl: tokens", "ms", "llama-server: tokens", "ms", "sooner"],
            first_token_rows(records),
        ),
        ("Tokens per second", "", ["what", "pyctl", "llama-server", "ratio"], speed_rows(records)),
        (
            "Share of a cold prefill spent on snapshots",
            "Reported includes waits for a running batch; by the clock compares with `cache_prompt: false`.",
            ["tokens", "reported", "by the clock"],
            cut_rows(records),
        ),
        (
            "Rows and state, GB/s",
            "In brackets the share of one copy of as many bytes between pinned and device memory.",
            ["what", "tokens", "MB", "save", "restore"],
            copy_rows(records),
        ),
        (
            "From disk",
            "The drive alone: the same files past the page cache, best of several depths.",
            ["way", "conversation", "read from the drive", "restored GB/s", "drive alone GB/s", "share"],
            disk_rows(records),
        ),
        (
            "Memory, MiB",
            "Against the moment before the start; RAM is what the machine has less of, the cache's share as it says.",
            ["server", "when", "VRAM", "RAM", "cache"],
            memory_rows(records),
        ),
        (
            "RAM of kept turns",
            "",
            ["way", "new tokens", "snapshots", "MB", "rows and states MB", "ratio"],
            kept_rows(records),
        ),
        (
            "Exactness",
            "Logits, largest difference from a cold run; the last column compares another prompt and must not be 0.",
            ["KV", "flash", *exact],
            exact_rows(records),
        ),
        (
            "On a card of 24 GB",
            "",
            ["flags", "VRAM left MiB", "VRAM used MiB", "prompt", "cold s", "next turn ms"],
            card_rows(records),
        ),
    ):
        lines += _section(title, text, columns, rows)
    skipped = [f"- {r['section']}: {r['what']} ({r['why']})" for r in records if r["kind"] == "skipped"]
    lines += ["## Not measured", "", *skipped, ""] if skipped else []
    return "\n".join(lines).rstrip()
