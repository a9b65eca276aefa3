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
        yield from _speeds(records, depths)
        yield ""
    yield from _drafts(records)
    yield from _exact(_of_kind(records, "exact"))
    yield from map(_memory, _of_kind(records, "memory"))
    for record in _of_kind(records, "skipped"):
        yield from _wrapped("skipped", record["what"], record["why"])
    for record in _of_kind(records, "failed"):
        yield from _wrapped("failed", record["server"], record["why"])


def _speeds(records: Sequence[Record], depths: Sequence[int]) -> Iterator[str]:
    """Yield the rows of first tokens, prefill and decode, with a column for each depth."""
    title = "prompt tokens".ljust(WAY + SERVER)
    columns = [f"{depth:>{COLUMN},}" for depth in depths]
    yield title + "".join(columns)
    yield "first token, ms"
    for way in WAYS:
        of_way = [record for record in records if record.get("way") == way]
        yield from _rows(f"  {way}", of_way, map(_first_token, of_way), depths)
    for kind in ("prefill", "decode"):
        of_kind = _of_kind(records, kind)
        rates = [_number(record["rate"]) for record in of_kind]
        yield from _rows(f"{kind}, tokens/s", of_kind, rates, depths)


def _first_token(record: Record) -> str:
    return "missed" if _is_missed(record) else _number(record["first_ms"])


def _memory(record: Record) -> str:
    server: str = record["server"]
    text = "memory".ljust(WAY)
    text += server.ljust(SERVER)
    ram = record["ram_mib"]
    vram = record["vram_mib"]
    text += f"RAM {ram:,.0f} MiB"
    if vram is not None:
        text += f", VRAM {vram:,.0f} MiB"
    return text


def is_wrong(records: Iterable[Record]) -> bool:
    """Return whether a server failed, or a restored prompt differs from a cold one where it must
    not.
    """
    return any(map(_is_fault, records))


def _is_fault(record: Record) -> bool:
    if record["kind"] == "failed":
        return True
    if record["kind"] != "exact" or not record["difference"]:
        return False
    if record["mode"] == "--exact":
        return True
    # Without --exact, rows of a generated reply come from its single steps, which a batch does not
    # reproduce.
    return bool(record["what"] != "after its own reply")


def _of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _wrapped(title: str, subject: str, reason: str) -> list[str]:
    return textwrap.wrap(
        f"{subject}: {reason}",
        TABLE,
        initial_indent=title.ljust(WAY),
        subsequent_indent=" " * WAY,
    )


def _is_missed(record: Record) -> bool:
    """Return whether a prompt was not restored from the source of its row."""
    way = record["way"]
    return way in EXPECTED and bool(record["source"] != EXPECTED[way])


def _rows(
    title: str,
    records: Sequence[Record],
    texts: Iterable[str],
    depths: Sequence[int],
) -> Iterator[str]:
    """Yield a line per server, with a text for each record; a source that no server used has no
    line.
    """
    by_server: dict[str, dict[int, str]] = {OURS: {}, PEER: {}}
    for record, text in zip(records, texts, strict=True):
        by_server[record["server"]][record["depth"]] = text
    for server, by_depth in by_server.items():
        if not by_depth:
            continue
        cells = [by_depth.get(depth, "-").rjust(COLUMN) for depth in depths]
        yield title.ljust(WAY) + server.ljust(SERVER) + "".join(cells)
        title = ""


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _drafts(records: Sequence[Record]) -> Iterator[str]:
    plain: dict[int, Record] = {}
    for record in _of_kind(records, "decode"):
        if record["server"] == OURS:
            plain[record["depth"]] = record
    title = "drafts of its head".ljust(WAY)
    for record in _of_kind(records, "drafts"):
        before = plain.get(record["depth"], {}).get("rate")
        rate = _number(record["rate"])
        if record["drafted"]:
            share = _share([record])
            yield f"{title}{rate} instead of {_number(before)} tokens/s, {share}"
        else:  # the same measured twice: a difference is the machine's noise
            yield f"{title}{_number(before or record['rate'])} tokens/s, no drafts"
    if any(record["drafted"] for record in plain.values()):
        title = "drafts".ljust(WAY)
        yield title + _share(plain.values())


def _share(records: Iterable[Record]) -> str:
    n_drafted = 0
    n_accepted = 0
    for record in records:
        n_drafted += record["drafted"]
        n_accepted += record["accepted"]
    return f"{n_accepted:,} of {n_drafted:,} drafts accepted"


def _exact(records: Sequence[Record]) -> Iterator[str]:
    if not records:
        return
    yield "exactness: largest difference of log-probabilities from a cold prompt"
    by_mode: dict[str, list[str]] = {}
    for record in records:
        difference = f"{record['difference']:.2g}" if record["cached"] else "not restored"
        cells = by_mode.setdefault(record["mode"], [])
        cells.append(f"{record['what']} {difference}")
    for mode, cells in by_mode.items():
        title = f"  {mode}".ljust(WAY)
        yield title + ", ".join(cells)
