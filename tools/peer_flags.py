"""Flags of llama-server beside those of `pyctl serve`: the same, another default, ignored, refused.

    python -m tools.peer_flags /path/to/llama-server           # prints flags without a decision
    python -m tools.peer_flags --write                         # writes the tables of migration.md

`DECISIONS` has a line for each flag whose default reads differently: its name, the verdict, both
defaults, both as the page shows them, and the reason, between tabs. The help of llama-server
itself is read and not kept.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pyctl.cli.arguments import FLAGS
from pyctl.cli.flag_aliases import IGNORED, NO_OP, REJECTED
from pyctl.settings.setting import Flag

__all__ = [
    "PAGE",
    "Comparison",
    "PeerFlag",
    "compare",
    "decisions",
    "help_of",
    "name_of",
    "parse_help",
    "recorded",
    "undecided",
    "written",
]

ROOT = Path(__file__).resolve().parents[1]
DECISIONS = ROOT / "tools" / "peer_flags.tsv"
PAGE = ROOT / "docs" / "migration.md"

BEGIN = "<!-- flags: python -m tools.peer_flags --write -->"
END = "<!-- end of flags -->"

HEAD = re.compile(r"^(-[\w-]+,? .*|-[\w-]+)$")
NAME = re.compile(r"(?<![\w<|-])--?[A-Za-z][\w-]*")
DEFAULT = re.compile(r"\bdefault: ([^()]*)")


class PeerFlag(NamedTuple):
    """A flag of llama-server: all its names, and its default, "" if the help names none."""

    names: tuple[str, ...]
    default: str


class Comparison(NamedTuple):
    """A flag of llama-server, and the verdict: same, differs, ignored, refused or unknown.

    ``ours`` is pyctl's default, "" unless both programs have the flag.
    """

    flag: PeerFlag
    verdict: str
    ours: str = ""


class Decision(NamedTuple):
    """A flag whose defaults read differently: "same" if they mean the same, else "other".

    Attributes:
        theirs: `recorded` of llama-server's default.
        ours: pyctl's default, as its help has it.
        shown_theirs: llama-server's default as docs/migration.md has it.
        shown_ours: The same of pyctl's.
        reason: Why they differ, or the common meaning.
    """

    name: str
    verdict: str
    theirs: str
    ours: str
    shown_theirs: str
    shown_ours: str
    reason: str


def help_of(program: str) -> str:
    """Return the text of --help. OSError or subprocess.SubprocessError if it cannot be run."""
    done = subprocess.run(
        [program, "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def parse_help(text: str) -> list[PeerFlag]:
    """Return the flags of llama-server's --help; those without a long name keep their short one."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if HEAD.match(line) and not line.startswith("-----"):
            blocks.append([line])
        elif blocks and line.startswith(" "):
            blocks[-1].append(line)
    return [_peer_flag(block) for block in blocks]


def _peer_flag(block: Sequence[str]) -> PeerFlag:
    """Return the flag that the lines of ``block`` describe; its names end at two blanks."""
    head = re.split(r"\s{2,}(?![-\s])", block[0])[0]
    text = " ".join(" ".join(block).split())
    defaults = DEFAULT.findall(text)
    return PeerFlag(tuple(NAME.findall(head)), defaults[-1].strip("'\" .") if defaults else "")


def compare(peer: Sequence[PeerFlag]) -> list[Comparison]:
    """Return the verdict on each flag of llama-server."""
    ours = {name: flag for flags in FLAGS.values() for flag in flags for name in flag.spellings()}
    return [_compared(flag, ours) for flag in peer]


def _compared(peer: PeerFlag, ours: dict[str, Flag]) -> Comparison:
    if flag := next((ours[name] for name in peer.names if name in ours), None):
        default = flag.default or ""
        is_same = _normal(default) == _normal(peer.default)
        return Comparison(peer, "same" if is_same else "differs", default)
    if any(name in REJECTED for name in peer.names):
        return Comparison(peer, "refused")
    if any(name in NO_OP or name in IGNORED for name in peer.names):
        return Comparison(peer, "ignored")
    return Comparison(peer, "unknown")


def _normal(default: str) -> str:
    """Return a default as a number, a switch or a text, in one spelling."""
    first = re.split("[,;]", default)[0].strip("'\" ").lower()
    if first in ("off", "false", "disabled", "none", "unused"):
        return ""
    if first in ("true", "enabled"):
        return "on"
    try:
        return str(float(first))
    except ValueError:
        return first


def recorded(default: str) -> str:
    """Return a default of llama-server as `DECISIONS` has it: a value, or a digest of a sentence,
    whose text is llama-server's own.
    """
    value = re.split("[,;]", default)[0]
    if " " not in value:
        return value
    return "#" + hashlib.blake2b(value.encode(), digest_size=4).hexdigest()


def decisions() -> dict[str, Decision]:
    """Return the decisions by the name of the flag."""
    lines = DECISIONS.read_text(encoding="utf-8").splitlines()
    found = [Decision(*line.split("\t")) for line in lines]
    return {decision.name: decision for decision in found}


def name_of(flag: PeerFlag) -> str:
    """Return the longest name of a flag, under which a decision has it; negations come last."""
    return max(flag.names, key=lambda name: (not name.startswith("--no-"), len(name)))


def undecided(compared: Sequence[Comparison]) -> Iterator[str]:
    """Yield a line for each flag without a decision, or with one about other defaults."""
    decided = decisions()
    for comparison in compared:
        name = name_of(comparison.flag)
        theirs = recorded(comparison.flag.default)
        shown = f"{name}\t{comparison.verdict}\t{theirs}\t{comparison.ours}"
        if comparison.verdict == "unknown":
            yield shown
        if comparison.verdict != "differs":
            continue
        decision = decided.get(name)
        printed = (recorded(comparison.flag.default), comparison.ours)
        if decision is None or (decision.theirs, decision.ours) != printed:
            yield shown


def tables() -> str:
    """Return the part of docs/migration.md between `BEGIN` and `END`: other defaults, and names
    that are ignored or refused.
    """
    rows = [
        f"| `{each.name}` | {each.shown_theirs} | {each.shown_ours} | {each.reason} |"
        for each in decisions().values()
        if each.verdict == "other"
    ]
    ignored = ", ".join(f"`{name}`" for name in sorted(IGNORED) if name.startswith("--"))
    head = ["| flag | llama-server | pyctl | reason |", "|---|---|---|---|"]
    text = textwrap.fill(
        f"Taken with a warning and without effect: {ignored}.", 100, break_on_hyphens=False
    )
    return "\n".join([BEGIN, "", *head, *rows, "", text, "", END])


def written(page: str) -> str:
    """Return the text of the page with its tables written anew."""
    before, _, rest = page.partition(BEGIN)
    return before + tables() + rest.partition(END)[2]


def main(argv: Sequence[str] | None = None) -> None:
    """Print flags without a decision, or write the tables. SystemExit if a decision is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", nargs="?", help="llama-server; without it, only --write")
    parser.add_argument("--write", action="store_true", help="write docs/migration.md")
    args = parser.parse_args(argv)
    missing = list(undecided(compare(parse_help(help_of(args.program))))) if args.program else []
    if missing:
        raise SystemExit("\n".join(missing))
    if args.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
