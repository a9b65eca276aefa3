"""A report on the records of a measurement: medians and ratios, tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = [
    "BARE",
    "BY_DEFAULT",
    "COLD",
    "FIRST_TOKEN",
    "ONE_MESSAGE",
    "OURS",
    "PEER",
    "RESTART",
    "TO_HALF",
    "WARM_RESTART",
    "Record",
    "document",
    "first_tokens",
    "median_of",
    "ratio",
    "table_lines",
]

Record = dict[str, Any]

OURS = "pyctl"
PEER = "llama-server"
FIRST_TOKEN = "first token"
BY_DEFAULT = "first token by default"
"""Kinds of records: with the flags of a section, and with as few flags as possible."""

COLD = "cold"
ONE_MESSAGE = "cold, one message"
BARE = "cold, nothing cached"
TO_HALF = "shortened to half"
RESTART = "after a restart"
WARM_RESTART = "after a restart, files in the page cache"
WAYS = (
    COLD,
    ONE_MESSAGE,
    "append",
    "regenerate",
    "branch",
    "edited at once",
    ("return after another"),
    "shortened",
    TO_HALF,
    RESTART,
    WARM_RESTART,
)


def median_of(records: Iterable[Record], field: str, **wanted: object) -> float | None:
    """Return the median of ``field`` over the records that have all of ``wanted``; None if there
    are none.
    """
    values = [
        record[field]
        for record in records
        if record.get(field) is not None
        and all(record.get(name) == value for name, value in wanted.items())
    ]
    return statistics.median(values) if values else None


def first_tokens(
    records: Sequence[Record], kind: str = FIRST_TOKEN
) -> list[tuple[int, str, dict[str, tuple[float, float]]]]:
    """Return (size, way, {server: (tokens evaluated, milliseconds)}) for everything measured, long
    conversations last.

    The time of llama-server after a restart does not depend on the page cache, so it is next to
    both of ours.
    """
    found = []
    for size in sorted({record["size"] for record in records if record["kind"] == kind}):
        for way in WAYS:
            servers = {}
            for server in (OURS, PEER):
                asked = RESTART if server == PEER and way == WARM_RESTART else way
                key = {"kind": kind, "size": size, "way": asked, "server": server}
                evaluated = median_of(records, "evaluated", **key)
                ms = median_of(records, "first_ms", **key)
                if evaluated is not None and ms is not None:
                    servers[server] = (evaluated, ms)
            if servers:
                found.append((size, way, servers))
    return found


def of_both(records: Sequence[Record], field: str, **wanted: object) -> list[float | None]:
    """Return the median of each server."""
    return [median_of(records, field, server=server, **wanted) for server in (OURS, PEER)]


def ratio(a: float | None, b: float | None) -> float | None:
    """Return the ratio of two numbers, None unless both are known."""
    return None if a is None or b is None or not b else a / b


def speeds(records: Sequence[Record]) -> list[tuple[str, float | None, float | None]]:
    """Return (what, pyctl's tokens per second, llama-server's) for prefill and decode."""
    found = []
    for size, way, servers in sorted(first_tokens(records), key=lambda each: each[:2]):
        if way in (COLD, ONE_MESSAGE):
            ours, peer = (
                servers[s][0] / servers[s][1] * 1e3 if s in servers else None for s in (OURS, PEER)
            )
            found.append((f"prefill, {way}, {size:,} tokens", ours, peer))
    for size in sorted({record["size"] for record in records if record["kind"] == "decode"}):
        ours, peer = of_both(records, "tokens_per_second", kind="decode", size=size)
        found.append((f"decode after {size:,} tokens", ours, peer))
    return found


def stream_rates(records: Sequence[Record]) -> list[tuple[int, float | None, float | None]]:
    """Return (streams, pyctl's tokens per second of each, llama-server's)."""
    streams = sorted({record["streams"] for record in records if record["kind"] == "streams"})
    return [(n, *of_both(records, "tokens_per_second", streams=n)) for n in streams]


def cut_shares(records: Sequence[Record]) -> list[tuple[int, float, float | None]]:
    """Return (size, share of the time to the first token reported for saving, share by the clock
    against nothing cached).
    """
    found = []
    for size in sorted(
        {r["size"] for r in records if r["kind"] == FIRST_TOKEN and r["way"] == COLD}
    ):
        key = {"kind": FIRST_TOKEN, "size": size, "server": OURS}
        ms = median_of(records, "first_ms", way=COLD, **key)
        save = median_of(records, "save_ms", way=COLD, **key)
        bare = median_of(records, "first_ms", way=BARE, **key)
        if ms is not None and save is not None:
            found.append((size, save / ms, None if bare is None else (ms - bare) / ms))
    return found


def disk_rates(records: Sequence[Record]) -> list[tuple[str, int, float, float, float | None]]:
    """Return (state of the page cache, size, share of bytes read from the drive, GB/s restored, the
    drive's own GB/s).
    """
    found = []
    drive = max(
        (record["gb_per_second"] for record in records if record["kind"] == "drive"), default=None
    )
    for record in records:
        if record["kind"] == "disk restore" and record["restore_ms"]:
            rate = record["bytes"] / record["restore_ms"] / 1e6
            found.append(
                (record["way"], record["size"], record["read"] / record["bytes"], rate, drive)
            )
    return found


Row = list[str]


def _show(value: float | None, form: str = "{:.1f}") -> str:
    return "" if value is None else form.format(value)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---:|" * len(columns)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _section(
    title: str, text: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> list[str]:
    return (
        [f"## {title}", "", *([text, ""] if text else []), *table_lines(columns, rows)]
        if rows
        else []
    )


def first_token_rows(records: Sequence[Record], kind: str = FIRST_TOKEN) -> list[Row]:
    rows = []
    for size, way, servers in first_tokens(records, kind):
        (n_ours, ours), (n_peer, peer) = (
            servers.get(OURS, (None, None)),
            servers.get(PEER, (None, None)),
        )
        cells = [
            f"{size:,}",
            way,
            _show(n_ours, "{:,.0f}"),
            _show(ours, "{:,.0f}"),
            _show(n_peer, "{:,.0f}"),
        ]
        rows.append([*cells, _show(peer, "{:,.0f}"), _show(ratio(peer, ours), "{:.2f}x")])
    return rows


def speed_rows(records: Sequence[Record]) -> list[Row]:
    return [
        [what, _show(ours, "{:,.1f}"), _show(peer, "{:,.1f}"), _show(ratio(ours, peer), "{:.3f}")]
        for what, ours, peer in speeds(records)
    ]


def _rows(records: Sequence[Record], kind: str, cells: Callable[[Record], Row]) -> list[Row]:
    return [cells(record) for record in records if record["kind"] == kind]


def cut_rows(records: Sequence[Record]) -> list[Row]:
    return [
        [f"{n:,}", f"{reported:.2%}", _show(clock, "{:.2%}")]
        for n, reported, clock in cut_shares(records)
    ]


def copy_cells(r: Record) -> Row:
    rates = [f"{r['out']:.1f} ({r['out_share']:.0%})", f"{r['back']:.1f} ({r['back_share']:.0%})"]
    return [r["what"], f"{r['tokens']:,}", f"{r['mb']:,.0f}", *rates]


def disk_rows(records: Sequence[Record]) -> list[Row]:
    return [
        [
            way,
            f"{size:,}",
            f"{read:.0%}",
            f"{rate:.2f}",
            _show(drive, "{:.2f}"),
            _show(ratio(rate, drive), "{:.0%}"),
        ]
        for way, size, read, rate, drive in disk_rates(records)
    ]


def memory_cells(r: Record) -> Row:
    names = (
        "vram_mib",
        "ram_mib",
        "resident_mib",
        "cache_mib",
        "blocks_mib",
        "in_flight_mib",
        "arena_mib",
    )
    return [
        r["server"],
        f"{r['section']}, {r['when']}",
        *(_show(r.get(name), "{:,.0f}") for name in names),
    ]


def return_cells(record: Record) -> Row:
    times = [f"{record[name]:,.1f}" for name in ("append_ms", "held_ms", "ram_ms")]
    return [f"{record['n']:,}", *times, "yes" if record["equal"] else "NO"]


def kept_cells(r: Record) -> Row:
    sizes = [f"{r['bytes'] / 1e6:,.1f}", f"{r['theory'] / 1e6:,.1f}", f"{r['ratio']:.3f}"]
    return [r["way"], f"{r['tokens']:,}", str(r["snapshots"]), *sizes]


CARD_SPEEDS = ("prompt", "cold s", "next turn ms", "tokens/s")


def card_cells(r: Record) -> Row:
    memory = [
        f"{r['context']:,}",
        f"{r['vram_mib']:,.0f}",
        f"{r['ram_mib']:,.0f}",
        f"{r['load_s']:.1f}",
    ]
    speeds = [
        f"{r['prompt']:,}",
        f"{r['first_ms'] / 1e3:,.1f}",
        f"{r['next_ms']:,.0f}",
        _show(r["tokens_per_second"]),
    ]
    return [r["name"], f"`{r['flags']}`" if r["flags"] else "", *memory, *speeds]


def exact_cells(record: Record) -> Row:
    return [
        record["kv"],
        record["flash"],
        *(f"{value:.3g}" for value in record["differences"].values()),
    ]


def document(data: dict[str, Any]) -> str:
    """Return all tables of one model as Markdown."""
    records = data["records"]
    lines = [f"# pyctl and llama-server side by side, {data['shape']} shape", ""]
    lines += [f"- {name}: {value}" for name, value in data.get("machine", {}).items()]
    flags = next((record["flags"] for record in records if record["kind"] == "flags"), None)
    lines += [f"- flags of both: `{flags}`"] * bool(flags) + [""]
    exact = next(
        (list(record["differences"]) for record in records if record["kind"] == "exact"), []
    )
    for title, text, columns, rows in (
        (
            "Time to first token",
            "Milliseconds on the client's clock, streaming, medians; tokens are those evaluated.",
            ["conversation", "way", "pyctl: tokens", "ms", "llama-server: tokens", "ms", "sooner"],
            first_token_rows(records),
        ),
        ("Tokens per second", "", ["what", "pyctl", "llama-server", "ratio"], speed_rows(records)),
        (
            "Default flags",
            "Four sequences, no cache directory, -ub as each server has it; otherwise as above.",
            ["conversation", "way", "pyctl: tokens", "ms", "llama-server: tokens", "ms", "sooner"],
            first_token_rows(records, BY_DEFAULT),
        ),
        (
            "Replies side by side, default flags",
            "Tokens per second of each.",
            ["streams", "pyctl", "llama-server", "ratio"],
            [
                [str(n), _show(a), _show(b), _show(ratio(a, b), "{:.3f}")]
                for n, a, b in stream_rates(records)
            ],
        ),
        (
            "Back to a conversation on the device",
            "Milliseconds to the first logits of a message of 64 tokens (`bench.held`).",
            ["tokens", "append", "back, on the device", "back, from RAM", "equal bits"],
            _rows(records, "return", return_cells),
        ),
        (
            "Share of a cold prefill spent on snapshots",
            (
                "Reported includes waits for a running batch; by the clock compares with "
                "`cache_prompt: false`."
            ),
            ["tokens", "reported", "by the clock"],
            cut_rows(records),
        ),
        (
            "Rows and state, GB/s",
            "In brackets the share of one copy of as many bytes between pinned and device memory.",
            ["what", "tokens", "MB", "save", "restore"],
            _rows(records, "copy", copy_cells),
        ),
        (
            "From disk",
            "Only the drive: the same files past the page cache, best of several depths.",
            [
                "way",
                "conversation",
                "read from the drive",
                "restored GB/s",
                "drive alone GB/s",
                "share",
            ],
            disk_rows(records),
        ),
        (
            "Memory, MiB",
            "VRAM and RAM (what the machine has less of) against the moment before the start; "
            "resident is the "
            "process's, less the model's file. pyctl counts snapshots, all blocks, those in copy, "
            "those held ready.",
            [
                "server",
                "when",
                "VRAM",
                "RAM",
                "resident",
                "snapshots",
                "blocks",
                "in flight",
                "held",
            ],
            _rows(records, "memory", memory_cells),
        ),
        (
            "RAM of kept turns",
            "",
            ["way", "new tokens", "snapshots", "MB", "rows and states MB", "ratio"],
            _rows(records, "kept turn", kept_cells),
        ),
        (
            "Exactness",
            (
                "Logits, largest difference from a cold run; the last column compares another "
                "prompt "
                "and must not be 0."
            ),
            ["KV", "flash", *exact],
            _rows(records, "exact", exact_cells),
        ),
        (
            "On a card of 24 GB",
            "Another process holds the rest. 70 % of the tokens of a head are accepted by chance.",
            ["line", "flags", "context", "VRAM MiB", "RAM MiB", "start s", *CARD_SPEEDS],
            _rows(records, "small card", card_cells),
        ),
    ):
        lines += _section(title, text, columns, rows)
    skipped = [
        f"- {r['section']}: {r['what']} ({r['why']})" for r in records if r["kind"] == "skipped"
    ]
    lines += ["## Not measured", "", *skipped, ""] if skipped else []
    return "\n".join(lines).rstrip()
