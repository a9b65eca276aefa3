"""Writes the tables of README and docs that show measurements, from bench/results, bench/claims.tsv
and docs/24gb.md.

    python -m tools.figures            # writes them
    python -m tools.figures --check  # sources' age in commits; fails if a head or a table is wrong

A table follows the comment that names it, ``<!-- figures: first-token -->``, and a line about the
measurement. The head of a source names commit, date, machine, command and weights, as
`bench.gpu.machine.describe` writes it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from bench.head import HASH, age, head

__all__ = ["CLAIMS", "FIGURES", "check", "filled", "main", "pages"]

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
CARDS = {name: f"gpu-side-by-side-{shape}-nextn.md" for name, shape in SHAPES.items()}
DRAFTS = {name: f"gpu-decode-{shape}-nextn.md" for name, shape in SHAPES.items()}


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


def first_token(shape: str, way: str) -> tuple[str, str]:
    """Return milliseconds of llama-server and of pyctl at 32,768 tokens of history."""
    _, ours, _, peer, _ = row(SIDE_BY_SIDE[shape], "Time to first token", "32,768", way)
    return peer, ours


def readme_first_token() -> list[str]:
    left = ("regenerate", "shortened to half", "after a restart")
    body = [
        (WAYS[way], *(f"{ms} ms" for ms in first_token("27B", way)))
        for way in WAYS
        if way not in left
    ]
    # "base" are also the flags of the times.
    vram, ram = zip(
        *(row(SIDE_BY_SIDE["27B"], "Memory, MiB", server, "base, end")[:2] for server in SERVERS),
        strict=True,
    )
    body.append(("VRAM at the end", *(f"{mib} MiB" for mib in vram)))
    body.append(("RAM at the end", *(f"{mib} MiB" for mib in ram)))
    return table(("first token, 27B shape, 32K tokens of history", *SERVERS), body)


def first_tokens() -> list[str]:
    body = [
        (name, *first_token("27B", way), *first_token("35B-A3B", way)) for way, name in WAYS.items()
    ]
    return table(COLUMNS, body)


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


WORKLOADS = {
    "claude code": "Claude Code",
    "three agents": "three agents",
    "opencode": "OpenCode",
    "codex": "Codex",
    "qwen code": "Qwen Code",
    "cline": "Cline",
    "aider": "Aider",
    "open webui": "Open WebUI",
    "mini swe": "mini-swe-agent",
    "dynamic tail": "dynamic tail",
    "short requests": "short requests",
}


def evaluated_tokens() -> list[str]:
    body = []
    for workload, name in WORKLOADS.items():
        cells = row("replay.md", "At 8 GiB of the 27B", workload)
        body.append(
            (name, cells[4], cells[1], cells[8].partition(" ")[0], cells[7].partition(" ")[0])
        )
    return table(("workload", "llama-server", "pyctl", "seconds: llama-server", "pyctl"), body)


def drafts() -> list[str]:
    """Return the table of tokens per second of pyctl and of llama-server after 10,240 tokens, by
    the tokens that a step yields.
    """
    lengths = {"2": "length 2", "3": "length 3", "4": "all accepted"}
    cases = {
        "no drafts": "without drafts",
        **{name: f"n_max 3, {case}" for name, case in lengths.items()},
    }
    body = []
    for shape, page in DRAFTS.items():
        heading = "Tokens per second, at the length that was asked for"
        body.append(
            (
                shape,
                *(
                    " / ".join(row(page, heading, case, "10,240", "1,000")[:2])
                    for case in cases.values()
                ),
            )
        )
    return table(("tokens per step", *cases), body)


TEXTS = ("plain text", "a file", "search and replace", "JSON calls")


def texts() -> list[str]:
    """Return the table of tokens per second of the default, of the head alone and of llama-server's
    best, by text, shape and replies.
    """
    cases = (
        ("pyctl", "draft-mtp,cache"),
        ("pyctl", "draft-mtp"),
        ("llama-server", "ngram-map-k,draft-mtp"),
    )
    body = []
    for shape, name in SHAPES.items():
        page = f"gpu-texts-{name}-nextn.md"
        heading = "Texts of their own, and changed files"
        for n, said in (("1", ""), ("4", ", 4 replies")):
            for text in TEXTS:
                body.append(
                    (
                        f"{shape}{said}: {text}",
                        *(row(page, heading, text, n, *case)[0] for case in cases),
                    )
                )
    return table(("text", "default", "`draft-mtp`", "llama-server: `ngram-map-k,draft-mtp`"), body)


def images() -> list[str]:
    body = []
    for name, request in (
        ("another question", "same image, next question"),
        ("after a restart", "after a restart"),
    ):
        ours, _, peer, *_ = row("gpu-images.md", "Asked about again", request)
        body.append((name, *(f"{cell.partition(' ')[0]} ms" for cell in (peer, ours))))
    return table(
        ("first token, question about a 1080p image in 23K tokens, 27B, one H200", *SERVERS), body
    )


def models() -> list[str]:
    """Return the table of contexts of docs/24gb.md, which the planner computed."""
    context = {name: n for name, n, *_ in rows("24gb.md", "A 24 GB card", DOCS)}
    shown = {
        "Qwen3.6-27B, Qwen3.8-27B": ("27B", "27B, q8_0"),
        "the same, with a head": ("27B with a head", "27B with a head, q8_0"),
        "Qwen3.6-35B-A3B": ("35B-A3B, with a head or without", "35B-A3B, q8_0"),
    }
    body = [(title, *(context[name] for name in names)) for title, names in shown.items()]
    return table(("tokens of context on 24 GB, Q4_K_M, computed", "f16", "q8_0"), body)


CARD = {
    "defaults": "its defaults",
    "defaults, no drafts": "`--spec-type none`",
    "expert": "expert: q8_0, `-np 1`, drafts",
}


def card(shape: str) -> list[str]:
    """Return the table of the defaults on 24,000 MiB next to the flags of an expert."""
    body = []
    for name, _, context, vram, ram, start, _, cold, turn, speed in rows(
        CARDS[shape], "On a card of 24 GB"
    )[1:]:
        body.append(
            (CARD[name], context, vram, ram, f"{start} s", f"{cold} s", f"{turn} ms", speed)
        )
    return table(
        (shape, "context", "VRAM", "RAM", "start", "first token", "next turn", "tokens/s"), body
    )


SWITCHES = {
    "first time": "first prompt",
    "another model and back": "back from the other model",
    "files not in RAM": "back, files not in RAM",
}


def switches() -> list[str]:
    """Return the table of seconds to the first token of a request that switches the model, and of
    loading.
    """
    found = json.loads((RESULTS / "gpu-models.json").read_text(encoding="utf-8"))["found"]
    by_way: dict[tuple[str, int], dict[tuple[str, str], str]] = {}
    for record in found:
        if record["way"] in SWITCHES and "size" in record:
            cell = f"{record['first_s']:.1f} ({record['load_s']:.1f})"
            by_way.setdefault((record["way"], record["size"]), {})[
                record["server"], record["model"]
            ] = cell
    columns = [(server, f"{shape}-nextn") for server in SERVERS for shape in SHAPES.values()]
    order = sorted(by_way, key=lambda key: (key[1], list(SWITCHES).index(key[0])))
    body = [
        (f"{size:,}", SWITCHES[way], *(by_way[way, size].get(key, "") for key in columns))
        for way, size in order
    ]
    lines = table(("tokens", "", "llama-server: 27B", "35B-A3B", "pyctl: 27B", "35B-A3B"), body)
    return [lines[0], lines[1].replace("--- | ---:", "---: | ---", 1), *lines[2:]]


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
        """Return weights, device, commit and date of the sources, above the table."""
        heads = [head(RESULTS / source) for source in self.sources]
        parts = [f"{each['weights']} weights" for each in heads]
        parts += [re.split("[,;]", each["machine"])[0] for each in heads]
        parts += [f"commit {commit}" for each in heads for commit in HASH.findall(each["commit"])]
        said = ", ".join(dict.fromkeys([*parts, *(each["date"][:10] for each in heads)]))
        return [f"*{said[0].upper()}{said[1:]}*", ""] if said else []


FIGURES = {
    "readme-first-token": Figure(readme_first_token, (SIDE_BY_SIDE["27B"],)),
    "models": Figure(models),
    "card-27b": Figure(lambda: card("27B"), (CARDS["27B"],)),
    "card-35b-a3b": Figure(lambda: card("35B-A3B"), (CARDS["35B-A3B"],)),
    "first-token": Figure(first_tokens, tuple(SIDE_BY_SIDE.values())),
    "default-flags": Figure(default_flags, tuple(SIDE_BY_SIDE.values())),
    "evaluated-tokens": Figure(evaluated_tokens, ("replay.md",)),
    "drafts": Figure(drafts, tuple(DRAFTS.values())),
    "texts": Figure(texts, tuple(f"gpu-texts-{name}-nextn.md" for name in SHAPES.values())),
    "switches": Figure(switches, ("gpu-models.json",)),
    "images": Figure(images, ("gpu-images.md",)),
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
    """Print the age of each source; the sources without a head and the pages with other tables than
    theirs.
    """
    wrong = []
    for source in sorted([*RESULTS.glob("*.md"), *RESULTS.glob("*.json")]):
        try:
            (commit, *_) = HASH.findall(head(source)["commit"])
            print(f"{source.name:40} {commit}  {age(commit)}")
        except ValueError as error:
            wrong.append(str(error))
    for page in pages() if not wrong else ():
        if filled(text := page.read_text(encoding="utf-8")) != text:
            wrong.append(f"{page.name}: run python -m tools.figures")
    return wrong


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="print ages, write nothing")
    if parser.parse_args(argv).check:
        raise SystemExit("\n".join(check()) or None)
    for page in pages():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
