"""Writes the tables of README and docs that show measurements, from bench/results, bench/claims.tsv
and docs/contexts.md.

    python -m tools.figures            # writes them
    python -m tools.figures --check    # sources' age in commits; fails if a head or a table is
                                       # wrong, or a table that is shown is too old

A table follows the comment that names it, ``<!-- figures: first-token -->``, and a line about the
measurement. The head of a source names commit, date, machine, command and weights, as
`bench.gpu.machine.describe` writes it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from bench.head import HASH, MAX_AGE, age, count_engine_commits, head

__all__ = ["CLAIMS", "FIGURES", "check", "filled", "is_stale", "main", "pages", "too_old"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
DOCS = ROOT / "docs"
CLAIMS = ROOT / "bench" / "claims.tsv"
"""A line for each claim of README and docs: the claim, a tab, and the command or test that shows
it.
"""

Cells: TypeAlias = list[str]

SHAPES = {"27B": "27b", "35B-A3B": "35b-a3b"}
SIDE_BY_SIDE = {name: f"gpu-side-by-side-{shape}.md" for name, shape in SHAPES.items()}

AGES = re.compile(r" \((\d+) engine commits since\)")
"""The age of a source in the caption of a table, counted when the table was written."""

MAX_DRIFT = 50
"""Engine commits after which the age in a caption is written anew: a caption that changed with each
commit would be in the way of every merge.
"""


def rows(page: str, heading: str, where: Path = RESULTS) -> list[Cells]:
    """Return the cells of the first table below ``heading`` of a page, its columns first.

    ValueError if a page of results lacks its head, or the page this heading.
    """
    if where == RESULTS:
        head(where / page)
    lines = iter((where / page).read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.lstrip("# ") == heading and line.startswith("#"):
            break
    else:
        raise ValueError(f"{page} has no heading {heading!r}")
    found: list[Cells] = []
    for line in lines:
        if line.startswith("#") or (found and not line.startswith("|")):
            break
        if line.startswith("|") and not re.fullmatch(r"[|:\- ]+", line):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def row(page: str, heading: str, *keys: str) -> Cells:
    """Return the cells of the one row that starts with ``keys``, without them."""
    (found,) = (cells for cells in rows(page, heading) if cells[: len(keys)] == list(keys))
    return found[len(keys) :]


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table: its first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *body)]


SERVERS = ("llama-server", "pyctl")
COLUMNS = ("", "27B: llama-server", "pyctl", "35B-A3B: llama-server", "pyctl")

WAYS = {
    "cold": "cold",
    "append": "next turn",
    "regenerate": "regenerate",
    "return after another": "another conversation and back",
    "shortened to half": "history shortened to half",
    "after a restart, files in the page cache": "after a restart, files still in RAM",
    "after a restart": "after a restart, files on the drive",
}


def first_token(way: str) -> tuple[str, str]:
    """Return milliseconds of llama-server and of pyctl with 27B at 32,768 tokens of history."""
    _, ours, _, peer, _ = row(SIDE_BY_SIDE["27B"], "Time to first token", "32,768", way)
    return peer, ours


README_WAYS = {
    "cold": "first token of a new prompt of 32,768 tokens",
    "append": "of the next turn",
    "return after another": "after another conversation and back",
    "after a restart, files in the page cache": "after a restart, files still in RAM",
    "after a restart": "after a restart, files on the drive",
}
HOUSEHOLDS = "traces-households.md"
"""Recorded sessions on both servers, with a restart, a switch of models or a second client."""


def readme() -> list[str]:
    """Return the table of README: first tokens, memory, and tokens of recorded sessions."""
    body = [(name, *(f"{ms} ms" for ms in first_token(way))) for way, name in README_WAYS.items()]
    # "base" are also the flags of the times.
    vram, ram = zip(
        *(row(SIDE_BY_SIDE["27B"], "Memory, MiB", server, "base, end")[:2] for server in SERVERS),
        strict=True,
    )
    body.append(("VRAM at the end", *(f"{mib} MiB" for mib in vram)))
    body.append(("RAM at the end", *(f"{mib} MiB" for mib in ram)))
    heading = (RESULTS / HOUSEHOLDS).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    both = [row(HOUSEHOLDS, heading, "a restart", server) for server in SERVERS]
    _, _, _, floor, *_ = both[0]
    evaluated = [cells[4] for cells in both]
    body.append((f"tiny model: tokens evaluated in 42 sessions, {floor} of them new", *evaluated))
    return table(("27B shape, on an H200", *SERVERS), body)


def first_tokens() -> list[str]:
    body = [(name, *first_token(way)) for way, name in WAYS.items()]
    return table(("27B", *SERVERS), body)


DEFAULTS = {
    "cold": ("32,768", "cold"),
    "next turn": ("32,768", "append"),
    "message edited right after its history": ("8,192", "edited at once"),
}


def default_flags() -> list[str]:
    """Return the table of first tokens, replies and memory of both servers with the flags that they
    need.
    """

    def pairs(heading: str, *keys: str, at: tuple[int, int]) -> list[str]:
        """Return the cells of llama-server and of pyctl, of each shape."""
        return [
            row(page, heading, *keys)[column] for page in SIDE_BY_SIDE.values() for column in at
        ]

    body = [
        [f"{name}, ms", *pairs("Default flags", *keys, at=(3, 1))]
        for name, keys in DEFAULTS.items()
    ]
    for n, name in (("1", "one reply, tokens/s"), ("4", "four replies, tokens/s each")):
        body.append([name, *pairs("Replies side by side, default flags", n, at=(1, 0))])
    vram = [
        row(page, "Memory, MiB", s, "defaults, end")[0]
        for page in SIDE_BY_SIDE.values()
        for s in SERVERS
    ]
    return table(COLUMNS, [*body, ["VRAM, MiB", *vram]])


def models() -> list[str]:
    """Return the table of contexts of docs/contexts.md, which the planner computed."""
    context = {name: n for name, n, *_ in rows("contexts.md", "24 GB", DOCS)}
    shown = {
        "Qwen3.6-27B, Qwen3.8-27B": ("27B", "27B, q8_0"),
        "the same, with a head": ("27B with a head", "27B with a head, q8_0"),
        "Qwen3.6-35B-A3B": ("35B-A3B, with a head or without", "35B-A3B, q8_0"),
    }
    body = [(title, *(context[name] for name in names)) for title, names in shown.items()]
    return table(("tokens of context on 24 GB, Q4_K_M, computed", "f16", "q8_0"), body)


def claims() -> list[str]:
    """Return the table of the claims of README and docs, and the evidence for each."""
    lines = CLAIMS.read_text(encoding="utf-8").splitlines()
    body = [f"| {claim} | `{shown}` |" for claim, shown in (line.split("\t") for line in lines)]
    return ["| claim | shown by |", "| --- | --- |", *body]


class Figure(NamedTuple):
    """The lines of a table, and the pages of bench/results that they come from."""

    lines: Callable[[], list[str]]
    sources: tuple[str, ...] = ()

    def caption(self) -> list[str]:
        """Return weights, device, commit with its age, and date of each source, above the table."""
        by_run: dict[str, list[str]] = {}
        for source in self.sources:
            commits = by_run.setdefault(_machine(source), [])
            commits += [each for each in _aged_commits(source) if each not in commits]
        said = "; ".join(f"{run}, {', '.join(commits)}" for run, commits in by_run.items())
        return [f"*{said[0].upper()}{said[1:]}*", ""] if said else []

    def commits(self) -> list[str]:
        """Return the commits that the sources were measured at."""
        return [
            commit
            for source in self.sources
            for commit in HASH.findall(head(RESULTS / source)["commit"])
        ]


def _machine(source: str) -> str:
    """Return weights, device and date of a source."""
    facts = head(RESULTS / source)
    device = re.split("[,;]", facts["machine"])[0]
    return f"{facts['weights']} weights, {device}, {facts['date'][:10]}"


def _aged_commits(source: str) -> list[str]:
    """Return the commits of a source, each with its age if the history is here."""
    aged = []
    for commit in HASH.findall(head(RESULTS / source)["commit"]):
        n = count_engine_commits(commit)
        aged.append(f"commit {commit}" + ("" if n is None else f" ({n} engine commits since)"))
    return aged


FIGURES = {
    "readme": Figure(readme, (SIDE_BY_SIDE["27B"], HOUSEHOLDS)),
    "models": Figure(models),
    "first-token": Figure(first_tokens, (SIDE_BY_SIDE["27B"],)),
    "default-flags": Figure(default_flags, tuple(SIDE_BY_SIDE.values())),
    "claims": Figure(claims),
}


def filled(text: str) -> str:
    """Return ``text`` with each table that a comment names written anew; ValueError if a source
    lacks its head.
    """

    def made(found: re.Match[str]) -> str:
        figure = FIGURES[found[1]]
        return "\n".join([found[0].partition("\n")[0], *figure.caption(), *figure.lines(), ""])

    return re.sub(
        r"^<!-- figures: ([\w-]+) -->\n(?:\*.*\*\n\n)?(?:\|.*\n)*", made, text, flags=re.MULTILINE
    )


def pages() -> list[Path]:
    """Return README and the pages of docs that show tables."""
    found = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [page for page in found if "<!-- figures: " in page.read_text(encoding="utf-8")]


def check() -> list[str]:
    """Print the age of each source; return the sources without a head, and the pages whose tables
    are not those of their sources, or whose captions have ages of long ago.
    """
    wrong = []
    for source in sorted([*RESULTS.glob("*.md"), *RESULTS.glob("*.json")]):
        try:
            (commit, *_) = HASH.findall(head(source)["commit"])
            print(f"{source.name:40} {commit}  {age(commit)}")
        except ValueError as error:
            wrong.append(str(error))
    for page in pages() if not wrong else ():
        text = page.read_text(encoding="utf-8")
        if is_stale(text, filled(text)):
            wrong.append(f"{page.name}: run python -m tools.figures")
    return wrong


def is_stale(written: str, anew: str) -> bool:
    """Return whether a page has other tables than ``anew``, or an age that is more than `MAX_DRIFT`
    engine commits behind. An unknown age is not compared.
    """
    if AGES.sub("", written) != AGES.sub("", anew):
        return True
    then = [int(age) for age in AGES.findall(written)]
    now = [int(age) for age in AGES.findall(anew)]
    return len(then) == len(now) and any(b - a > MAX_DRIFT for a, b in zip(then, now, strict=True))


def too_old(
    shown: Mapping[str, Figure] = FIGURES,
    count: Callable[[str], int | None] = count_engine_commits,
) -> list[str]:
    """Return a line for each table with a source that `MAX_AGE` engine commits have left behind.

    ``count`` returns the number of engine commits since a commit, None if it is unknown.
    """
    lines = []
    for name, figure in shown.items():
        ages = {commit: count(commit) or 0 for commit in figure.commits()}
        lines += [
            f"{name}: {n} engine commits since {commit}, at most {MAX_AGE}: measure it again, or "
            "take the table away"
            for commit, n in ages.items()
            if n > MAX_AGE
        ]
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="print ages, write nothing")
    if parser.parse_args(argv).check:
        raise SystemExit("\n".join([*check(), *too_old()]) or None)
    for page in pages():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
