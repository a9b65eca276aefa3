"""The records of `pyctl bench` as one table of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from pyctl.measure.bench_run import AGAIN, COLD, FROM_DISK, FROM_RAM, NEXT, OURS, PEER, Record

__all__ = ["is_wrong", "table_lines"]

TABLE = 80
WAY = 24
SERVER = 13
COLUMN = 10

WAYS = (COLD, NEXT, AGAIN, FROM_RAM, FROM_DISK)

EXPECTED = {FROM_RAM: "ram", FROM_DISK: "disk"}
"""The sources from which the prompts of a row were restored."""


def table_lines(records: Sequence[Record], header: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the table below ``header``; columns are depths, in prompt tokens."""
    yield from header
    depths = sorted({record["depth"] for record in records if "depth" in record})
    if depths:
        yield ""
        yield f"{'prompt tokens':{WAY + SERVER}}" + "".join(
            f"{depth:>{COLUMN},}" for depth in depths
        )
        yield "first token, ms"
        for way in WAYS:
            found = [record for record in records if record.get("way") == way]
            texts = [
                "missed" if _is_missed(record) else _number(record["first_ms"]) for record in found
            ]
            yield from _rows(f"  {way}", found, texts, depths)
        for kind, title in (("prefill", "prefill, tokens/s"), ("decode", "decode, tokens/s")):
            found = _of(records, kind)
            yield from _rows(title, found, [_number(record["rate"]) for record in found], depths)
        yield ""
    yield from _drafts(records)
    yield from _exact([record for record in records if record["kind"] == "exact"])
    for record in _of(records, "memory"):
        vram = "" if record["vram_mib"] is None else f", VRAM {record['vram_mib']:,.0f} MiB"
        yield f"{'memory':{WAY}}{record['server']:{SERVER}}RAM {record['ram_mib']:,.0f} MiB{vram}"
    for record in _of(records, "skipped"):
        yield from _wrapped("skipped", f"{record['what']}: {record['why']}")
    for record in _of(records, "failed"):
        yield from _wrapped("failed", f"{record['server']}: {record['why']}")


def is_wrong(records: Iterable[Record]) -> bool:
    """Return whether a server failed, or a restored prompt differs from a cold one where it must
    not.
    """
    return any(
        record["kind"] == "failed" or (record["kind"] == "exact" and _breaks(record))
        for record in records
    )


def _breaks(record: Record) -> bool:
    # Without --exact, rows of a generated reply come from its single steps, which a batch does not
    # reproduce.
    return bool(record["difference"]) and (
        record["mode"] == "--exact" or record["what"] != "after its own reply"
    )


def _of(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _wrapped(title: str, text: str) -> list[str]:
    return textwrap.wrap(text, TABLE, initial_indent=f"{title:{WAY}}", subsequent_indent=" " * WAY)


def _is_missed(record: Record) -> bool:
    """Return whether a prompt was not restored from the source of its row."""
    return bool(record["source"] != EXPECTED.get(record["way"], record["source"]))


def _rows(
    title: str, records: Sequence[Record], texts: Sequence[str], depths: Sequence[int]
) -> Iterator[str]:
    """Yield a line per server, with a text for each record; a source that no server used has no
    line.
    """
    for server in (OURS, PEER):
        pairs = zip(records, texts, strict=True)
        found = {record["depth"]: text for record, text in pairs if record["server"] == server}
        if found:
            cells = "".join(f"{found.get(depth, '-'):>{COLUMN}}" for depth in depths)
            yield f"{title:{WAY}}{server:{SERVER}}{cells}"
            title = ""


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _drafts(records: Sequence[Record]) -> Iterator[str]:
    plain = {
        record["depth"]: record for record in _of(records, "decode") if record["server"] == OURS
    }
    for record in _of(records, "drafts"):
        before = plain.get(record["depth"], {}).get("rate")
        if record["drafted"]:
            text = (
                f"{_number(record['rate'])} instead of {_number(before)} tokens/s, "
                f"{_share([record])}"
            )
        else:  # the same measured twice: a difference is the machine's noise
            text = f"{_number(before or record['rate'])} tokens/s, no drafts"
        yield f"{'drafts of its head':{WAY}}{text}"
    if any(record["drafted"] for record in plain.values()):
        yield f"{'drafts':{WAY}}{_share(list(plain.values()))}"


def _share(records: Sequence[Record]) -> str:
    drafted, accepted = (
        sum(record[field] for record in records) for field in ("drafted", "accepted")
    )
    return f"{accepted} of {drafted} accepted"


def _exact(records: Sequence[Record]) -> Iterator[str]:
    if not records:
        return
    yield "exactness: largest difference of log-probabilities from a cold prompt"
    for mode in dict.fromkeys(record["mode"] for record in records):
        cells = [
            f"{record['what']} {_difference(record)}"
            for record in records
            if record["mode"] == mode
        ]
        yield f"  {mode:{WAY - 2}}{', '.join(cells)}"


def _difference(record: Record) -> str:
    return f"{record['difference']:.2g}" if record["cached"] else "not restored"
