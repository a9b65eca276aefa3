"""A report on the records of `bench.gpu.speculative`: tables in Markdown, and the aims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.gpu.report import OURS, PEER, median_of, ratio, table_lines

__all__ = ["WITHOUT", "acceptance_rates", "aims", "document"]

Record = dict[str, Any]

WITHOUT = "without drafts"

NOT_DONE = ("failed", "skipped")
COLUMNS = ("length", "step ms", "steps with drafts", "tokens a draft")

FASTER, TOGETHER, PREFILL, VRAM_MIB = 1.15, 1.05, 0.97, 200.0
"""Aims: against llama-server at length 2 and above, in company, of a prompt's speed without a head, and beyond it."""


def acceptance_rates(length: float, n_max: int) -> tuple[float, ...]:
    """How often each of ``n_max`` drafts is right, together with all before it: powers of one number whose sum is
    ``length`` - 1."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, n_max + 1)) < length - 1:
            low = middle
        else:
            high = middle
    return tuple(round(high, 9) ** i for i in range(1, n_max + 1))


def length(record: Record) -> float:
    """Tokens per step."""
    return float(1 + record["accepted"] / record["steps"])


def at_wanted(record: Record) -> float:
    """Tokens per second if drafts as long as these had yielded what chance yields on average: it was more or less."""
    if not record["wanted"] or not record["drafts"]:
        return float(record["rate"])
    rates = acceptance_rates(record["wanted"], record["n_max"])
    mean = min(record["drafted"] / record["drafts"], record["n_max"])
    whole = int(mean)
    expected = sum(rates[:whole]) + (mean - whole) * sum(rates[whole : whole + 1])
    n_tokens = record["steps"] + record["accepted"]
    return float(record["rate"] * (record["steps"] + record["drafts"] * expected) / n_tokens)


def speed_rows(records: Sequence[Record]) -> list[list[str]]:
    """By case: both servers' speed, their ratio, the lengths that chance made, and milliseconds of a step."""
    rows = []
    for case in dict.fromkeys(record["case"] for record in records if record["kind"] == "speed"):
        both = {r["server"]: r for r in records if r["kind"] == "speed" and r["case"] == case}
        rates = {server: at_wanted(record) for server, record in both.items()}
        cells = [case, *(f"{rates[s]:.1f}" if s in rates else "" for s in (OURS, PEER))]
        found = ratio(rates.get(OURS), rates.get(PEER))
        cells.append("" if found is None else f"{found:.2f}")
        steps = {s: 1e3 * length(r) * r["n_seqs"] / r["rate"] for s, r in both.items()}
        drafts = {s: r["drafts"] / r["steps"] for s, r in both.items() if r["n_max"]}
        widths = {s: r["drafted"] / r["drafts"] for s, r in both.items() if r["drafts"]}
        lengths = {s: length(r) for s, r in both.items()}
        for values, form in ((lengths, "{:.2f}"), (steps, "{:.2f}"), (drafts, "{:.0%}"), (widths, "{:.1f}")):
            cells += [form.format(values[s]) if s in values else "" for s in (OURS, PEER)]
        rows.append(cells)
    return rows


def prefill_rows(records: Sequence[Record]) -> list[list[str]]:
    """By case: tokens of a prompt per second, and how much of the speed without drafts that is."""
    cold = [record for record in records if record.get("prefill")]
    rows = []
    for case in dict.fromkeys(record["case"] for record in cold):
        cells = [case]
        for server in (OURS, PEER):
            rate = median_of(cold, "prefill", case=case, server=server)
            of = ratio(rate, median_of(cold, "prefill", case=WITHOUT, server=server))
            cells += ["" if rate is None else f"{rate:,.0f}", "" if of is None else f"{of:.3f}"]
        rows.append(cells)
    return rows


def memory_rows(records: Sequence[Record]) -> list[list[str]]:
    """By case: MiB on the device and resident in RAM, of both."""
    rows = []
    for case in dict.fromkeys(record["case"] for record in records if record["kind"] == "speed"):
        key = {"kind": "speed", "case": case}
        cells = [case]
        for field in ("vram_mib", "resident_mib"):
            values = [median_of(records, field, server=server, **key) for server in (OURS, PEER)]
            cells += ["" if value is None else f"{value:,.0f}" for value in values]
        rows.append(cells)
    return rows


def restart_rows(records: Sequence[Record]) -> list[list[str]]:
    return [
        [
            *(r["server"], r["way"], f"{r['accepted']} of {r['drafted']}"),
            *(f"{r['accepted'] / max(r['drafted'], 1):.1%}", f"{r['evaluated']:,}", f"{r['first_ms']:,.0f}"),
        ]
        for r in records
        if r["kind"] == "restart"
    ]


def rewriting_rows(records: Sequence[Record]) -> list[list[str]]:
    """By server and way of drafting: speed, and of that of its head alone."""
    found = [record for record in records if record["kind"] == "rewriting"]
    rows = []
    for r in found:
        alone = median_of(found, "rate", server=r["server"], types="draft-mtp")
        cells = [
            r["server"],
            r["types"],
            f"{r['n']:,}",
            f"{r['rate']:.1f}",
            f"{r['rate'] / alone:.2f}" if alone else "",
        ]
        cells += [f"{r['n'] / r['steps']:.2f}", f"{r['drafted']:,}", f"{r['accepted'] / max(r['drafted'], 1):.0%}"]
        rows.append(cells)
    return rows


def aims(records: Sequence[Record]) -> list[tuple[str, str, str, bool]]:
    """(what, aim, found, reached) for every aim that was measured."""
    found: list[tuple[str, str, str, bool]] = []
    speed = [record for record in records if record["kind"] == "speed"]
    for case in dict.fromkeys(record["case"] for record in speed):
        both = {record["server"]: record for record in speed if record["case"] == case}
        if set(both) != {OURS, PEER}:
            continue
        ours, peer = both[OURS], both[PEER]
        faster = at_wanted(ours) / at_wanted(peer)
        if ours["n_max"] and (ours["n_seqs"] > 1 or ours["wanted"] >= 2):
            least = TOGETHER if ours["n_seqs"] > 1 else FASTER
            found.append((f"{case}: against llama-server", f">= {least}x", f"{faster:.2f}x", faster >= least))
        if ours["vram_mib"] is not None and peer["vram_mib"] is not None and ours["part"] != "defaults":
            beyond = ours["vram_mib"] - peer["vram_mib"]
            limit = f"<= {VRAM_MIB:.0f} MiB"
            found.append((f"{case}: VRAM beyond llama-server's", limit, f"{beyond:.0f} MiB", beyond <= VRAM_MIB))
    bare = median_of(speed, "prefill", case=WITHOUT, server=OURS)
    for record in speed:
        if record["server"] == OURS and record["n_max"] and record.get("prefill") and bare and record["n_seqs"] == 1:
            of = record["prefill"] / bare
            found.append((f"{record['case']}: prefill, of that without", f">= {PREFILL}", f"{of:.3f}", of >= PREFILL))
    shares = {
        r["way"]: r["accepted"] / max(r["drafted"], 1)
        for r in records
        if r["kind"] == "restart" and r["server"] == OURS
    }
    if len(shares) == 2 and any(shares.values()):
        before, after = shares["before"], shares["after a restart"]
        found.append(("accepted after a restart", f"{before:.1%}, as before", f"{after:.1%}", after >= before - 0.005))
    return found


def document(data: dict[str, Any]) -> str:
    """All tables of one model as Markdown."""
    records = data["records"]
    lines = [f"# Speculative decoding, pyctl and llama-server side by side, {data['shape']} shape", ""]
    lines += [f"- {name}: {value}" for name, value in data["machine"].items()]
    lines += [f"- prompt: {data['prompt']:,} tokens"] if "prompt" in data else []
    lines.append("")
    for title, columns, rows in (
        ("Aims", ["what", "aim", "found", "reached"], [[*a[:3], "yes" if a[3] else "NO"] for a in aims(records)]),
        (
            "Tokens per second, at the length that was asked for",
            ["case", OURS, PEER, "ratio", *(f"{server}: {what}" for what in COLUMNS for server in (OURS, PEER))],
            speed_rows(records),
        ),
        (
            "Prompt tokens per second, and of the speed without drafts",
            ["case", "pyctl", "share", "llama-server", "share"],
            prefill_rows(records),
        ),
        (
            "Memory, MiB",
            ["case", "pyctl: VRAM", "llama-server: VRAM", "pyctl: resident", "llama-server: resident"],
            memory_rows(records),
        ),
        (
            "A file written again with a dozen edits",
            ["server", "drafts", "tokens", "tokens/s", "of the head alone", "tokens a step", "drafted", "accepted"],
            rewriting_rows(records),
        ),
        (
            "The same reply before and after a restart",
            ["server", "when", "drafts accepted", "share", "evaluated", "first token ms"],
            restart_rows(records),
        ),
        (
            "Not measured",
            ["case", "server", "why"],
            [[r["case"], r["server"], r.get("why", "no time left")] for r in records if r["kind"] in NOT_DONE],
        ),
    ):  # fmt: skip
        if rows:
            lines += [f"## {title}", "", *table_lines(columns, [[c.replace("\n", " ") for c in row] for row in rows])]
    return "\n".join(lines)
