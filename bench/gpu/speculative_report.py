"""A report on the records of `bench.gpu.speculative`: tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.gpu.report import OURS, PEER, median_of, ratio, table_lines

__all__ = ["WITHOUT", "acceptance_rates", "document"]

Record = dict[str, Any]
Measured = tuple[str, int, int]

WITHOUT = "without drafts"

BOTH = (OURS, PEER)
NOT_DONE = ("failed", "skipped")
COLUMNS = ("length", "step ms", "steps with drafts", "tokens a draft")


def acceptance_rates(length: float, n_max: int) -> tuple[float, ...]:
    """Return the rates at which each of ``n_max`` drafts is right, together with all before it:
    powers of one number whose sum is ``length`` - 1, with ``length`` in tokens per step.
    """
    low = 0.0
    high = 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, n_max + 1)) < length - 1:
            low = middle
        else:
            high = middle
    return tuple(round(high, 9) ** i for i in range(1, n_max + 1))


def length(record: Record) -> float:
    """Return tokens per step."""
    return float(1 + record["accepted"] / record["steps"])


def at_wanted(record: Record) -> float:
    """Return tokens per second if drafts as long as these had yielded the average of their chances:
    it was more or less.
    """
    if not record["wanted"] or not record["drafts"]:
        return float(record["rate"])
    rates = acceptance_rates(record["wanted"], record["n_max"])
    mean = min(record["drafted"] / record["drafts"], record["n_max"])
    whole = int(mean)
    expected = sum(rates[:whole]) + (mean - whole) * sum(rates[whole : whole + 1])
    n_tokens = record["steps"] + record["accepted"]
    return float(record["rate"] * (record["steps"] + record["drafts"] * expected) / n_tokens)


def measured(records: Sequence[Record]) -> dict[Measured, dict[str, Record]]:
    """Return the record of each server, by case and tokens of the prompt and of the reply."""
    found: dict[Measured, dict[str, Record]] = {}
    for record in records:
        if record["kind"] == "speed":
            key = (record["case"], record.get("prompt", 0), record.get("reply", 0))
            found.setdefault(key, {})[record["server"]] = record
    return found


def speed_rows(records: Sequence[Record]) -> list[list[str]]:
    """Return a row for each case, prompt and reply: both speeds, their ratio, the lengths that
    chance made, and milliseconds of a step.
    """
    rows = []
    for (case, prompt, reply), both in measured(records).items():
        rates = {server: at_wanted(record) for server, record in both.items()}
        cells = [
            case,
            f"{prompt:,}",
            f"{reply:,}",
            *(f"{rates[s]:.1f}" if s in rates else "" for s in BOTH),
        ]
        found = ratio(rates.get(OURS), rates.get(PEER))
        cells.append("" if found is None else f"{found:.2f}")
        steps = {s: 1e3 * length(r) / r["rate"] for s, r in both.items()}
        drafts = {s: r["drafts"] / r["steps"] for s, r in both.items() if r["n_max"]}
        widths = {s: r["drafted"] / r["drafts"] for s, r in both.items() if r["drafts"]}
        lengths = {s: length(r) for s, r in both.items()}
        for values, form in (
            (lengths, "{:.2f}"),
            (steps, "{:.2f}"),
            (drafts, "{:.0%}"),
            (widths, "{:.1f}"),
        ):
            cells += [form.format(values[s]) if s in values else "" for s in BOTH]
        rows.append(cells)
    return rows


def prefill_rows(records: Sequence[Record]) -> list[list[str]]:
    """Return a row for each case and prompt: tokens of the prompt per second, and their ratio to
    the speed without drafts.
    """
    cold = [record for record in records if record.get("prefill")]
    rows = []
    for case, prompt in dict.fromkeys((record["case"], record.get("prompt", 0)) for record in cold):
        cells = [case, f"{prompt:,}"]
        for server in BOTH:
            of_prompt = [record for record in cold if record.get("prompt", 0) == prompt]
            rate = median_of(of_prompt, "prefill", case=case, server=server)
            of = ratio(rate, median_of(of_prompt, "prefill", case=WITHOUT, server=server))
            cells += ["" if rate is None else f"{rate:,.0f}", "" if of is None else f"{of:.3f}"]
        rows.append(cells)
    return rows


def memory_rows(records: Sequence[Record]) -> list[list[str]]:
    """Return a row for each case: MiB on the device and resident in RAM, of both servers."""
    rows = []
    for case in dict.fromkeys(record["case"] for record in records if record["kind"] == "speed"):
        key = {"kind": "speed", "case": case}
        cells = [case]
        for field in ("vram_mib", "resident_mib"):
            values = [median_of(records, field, server=server, **key) for server in BOTH]
            cells += ["" if value is None else f"{value:,.0f}" for value in values]
        rows.append(cells)
    return rows


def rewriting_rows(records: Sequence[Record]) -> list[list[str]]:
    """Return a row for each text, number of replies at once, server and way of drafting: speed,
    ratio to llama-server, tokens per step, memory.
    """
    found = [record for record in records if record["kind"] == "rewriting"]
    rows = []
    for r in sorted(found, key=lambda r: r["n_seqs"]):
        of = ratio(
            r["rate"], median_of(found, "rate", server=PEER, text=r["text"], n_seqs=r["n_seqs"])
        )
        cells = [
            r["text"],
            str(r["n_seqs"]),
            r["server"],
            r["types"],
            f"{r['rate']:.1f}",
            f"{of:.2f}" if of else "",
        ]
        rate_of_all = r.get("rate_of_all")
        cells.append(f"{rate_of_all:.1f}" if rate_of_all else "")
        cells += [
            f"{r['n'] / r['steps']:.2f}",
            f"{r['drafted']:,}",
            f"{r['accepted'] / max(r['drafted'], 1):.0%}",
        ]
        rows.append(
            cells
            + [
                "" if r[each] is None else f"{r[each]:,.0f}"
                for each in ("vram_mib", "resident_mib")
            ]
        )
    return rows


def document(data: dict[str, Any]) -> str:
    """Return all tables of one model as Markdown."""
    records = data["records"]
    lines = [
        f"# Speculative decoding, pyctl and llama-server side by side, {data['shape']} shape",
        "",
    ]
    lines += [f"- {name}: {value}" for name, value in data["machine"].items()]
    lines.append("")
    for title, columns, rows in (
        (
            "Tokens per second, at the length that was asked for",
            [
                "case",
                "prompt",
                "reply",
                OURS,
                PEER,
                "ratio",
                *(f"{s}: {column}" for column in COLUMNS for s in BOTH),
            ],
            speed_rows(records),
        ),
        (
            "Prompt tokens per second, and of the speed without drafts",
            ["case", "prompt", "pyctl", "share", "llama-server", "share"],
            prefill_rows(records),
        ),
        (
            "Memory, MiB",
            [
                "case",
                "pyctl: VRAM",
                "llama-server: VRAM",
                "pyctl: resident",
                ("llama-server: resident"),
            ],
            memory_rows(records),
        ),
        (
            "Texts of their own, and changed files",
            [
                "text",
                "replies",
                "server",
                "drafts",
                "tokens/s",
                f"of {PEER}'s",
                "tokens/s, while all are written",
                "tokens a step",
                "drafted",
                "accepted",
                "VRAM",
                "resident",
            ],
            rewriting_rows(records),
        ),
        (
            "Not measured",
            ["case", "server", "why"],
            [
                [r["case"], r["server"], r.get("why", "no time left")]
                for r in records
                if r["kind"] in NOT_DONE
            ],
        ),
    ):
        if rows:
            lines += [
                f"## {title}",
                "",
                *table_lines(columns, [[c.replace("\n", " ") for c in row] for row in rows]),
            ]
    return "\n".join(lines)
