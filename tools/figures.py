"""Writes the tables of README and docs that show measurements, from bench/results and docs/24gb.md.

    python -m tools.figures

A table follows the comment that names it: ``<!-- figures: first-token -->``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

__all__ = ["FIGURES", "PAGES", "filled", "main"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
NAMED = ("24gb", "benchmarks", "drafts", "several-models")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in NAMED))

Cells: TypeAlias = list[str]

SHAPES = {"27B": "27b", "35B-A3B": "35b-a3b"}
FAMILIES = {"Gemma 4": "gemma4-26b-a4b", "gpt-oss": "gpt-oss-20b", "qwen4exp": "qwen4exp-20b-a6b"}


def rows(page: str, heading: str, where: Path = RESULTS) -> list[Cells]:
    """The cells of the first table below ``heading`` of a page, its head first."""
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
    """The cells of the one row that begins with ``keys``, without them."""
    (found,) = (cells for cells in rows(page, heading) if cells[: len(keys)] == list(keys))
    return found[len(keys) :]


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table: its first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *body)]


def number(text: str) -> float:
    return float(text.replace(",", ""))


def seconds(ms: str, digits: int) -> str:
    return f"{number(ms) / 1e3:.{digits}f}" if ms else ""


# -- the tables --------------------------------------------------------------------------------------------------------

WAYS = {
    "cold": "cold",
    "append": "next turn",
    "regenerate": "regenerate",
    "branch": "branch",
    "return after another": "another conversation and back",
    "shortened": "history shortened",
    "shortened to half": "history shortened to half",
    "after a restart, files in the page cache": "after a restart, files in the page cache",
    "after a restart": "after a restart, files on the drive",
}


def first_token(shape: str, way: str) -> tuple[str, str]:
    """Milliseconds of llama-server and of pyctl at 32,768 tokens of history."""
    _, ours, _, peer, _ = row(f"gpu-side-by-side-{SHAPES[shape]}.md", "Time to first token", "32,768", way)
    return peer, ours


def readme_first_token() -> list[str]:
    shown = ("append", "return after another", "shortened to half", "after a restart, files in the page cache")
    body = [(WAYS[way], *(f"{ms} ms" for ms in first_token("27B", way))) for way in shown]
    return table(("first token, 27B, 32K tokens of history, one H200", "llama-server", "pyctl"), body)


def first_tokens() -> list[str]:
    body = [(name, *first_token("27B", way), *first_token("35B-A3B", way)) for way, name in WAYS.items()]
    return table(("", "27B: llama-server", "pyctl", "35B-A3B: llama-server", "pyctl"), body)


def families() -> list[str]:
    """As `first_tokens`, of models of other families, at 32,000 tokens."""
    found = [rows(f"gpu-side-by-side-{file}.md", "Time to first token") for file in FAMILIES.values()]
    servers = [[{each[1]: each[at] for each in table if each[0] == "32,000"} for table in found] for at in (5, 3)]
    body = [(name, *(cells[way] for server in servers for cells in server)) for way, name in WAYS.items()]
    first, *rest = FAMILIES
    return table(("", f"llama-server: {first}", *rest, f"pyctl: {first}", *rest), body)


def default_flags() -> list[str]:
    names = rows("gpu-steps.md", "The hierarchy")[0]
    measured = [row("gpu-steps.md", "The hierarchy", f"{SHAPES[shape]}, again") for shape in SHAPES]

    def pairs(column: str) -> list[tuple[str, str]]:
        """(llama-server, pyctl) of each shape; the source has them the other way round."""
        at = names.index(column) - 1
        return [(peer, ours) for ours, peer in (cells[at].split(" / ") for cells in measured)]

    body = [
        (name, *(cell for pair in pairs(column) for cell in pair))
        for name, column in (
            ("cold", "cold, 32K"),
            ("next turn", "next turn"),
            ("message edited right after its history", "history edited at once"),
        )
    ]
    body.append(("next turn after 300 tokens of thought and 700 of reply", *thoughts("27B"), *thoughts("35B-A3B")))
    for name, column in (("one reply", "one stream, tokens/s"), ("four replies", "four streams, each")):
        ratios = [f"{number(ours) / number(peer):.2f}" for peer, ours in pairs(column)]
        body.append((f"{name}, tokens/s each, of llama-server's", "1", ratios[0], "1", ratios[1]))
    more = [f"{number(ours) - number(peer):,.0f}" for peer, ours in pairs("VRAM MiB")]
    body.append(("VRAM beyond llama-server's, MiB", "", more[0], "", more[1]))
    return table(("", "27B: llama-server", "pyctl", "35B-A3B: llama-server", "pyctl"), body)


def thoughts(shape: str) -> tuple[str, str]:
    """Milliseconds of llama-server and of pyctl, some seconds after a reply with reasoning."""
    text = (RESULTS / "gpu-steps.md").read_text(encoding="utf-8")
    first, second = (part for part in re.split(r"\| server \| evaluated then .*\n", text)[1:3])
    part = first if shape == "35B-A3B" else second  # the order of that page
    (peer,) = re.findall(r"^\| llama-server \|.*\| ([\d,]+) \|$", part, re.MULTILINE)[:1]
    (ours,) = re.findall(r"^\| pyctl, \d s later \|.*\| ([\d,]+) \|$", part, re.MULTILINE)[:1]
    return peer, ours


LONG = (("27B", "100,000", "f16"), ("35B-A3B", "200,000", "q8_0"), ("27B", "200,000", "f16"))


def long_conversations() -> list[str]:
    body = []
    for shape, n, kv in LONG:
        ways = {way: row("gpu-long.md", f"{shape}, {kv}", n, way) for way in ("cold", "append", "after a restart")}
        (_, cold, _, peer_cold, _), (_, turn, _, peer_turn, _) = ways["cold"], ways["append"]
        times = (seconds(peer_cold, 1), seconds(cold, 1), seconds(peer_turn, 3), seconds(turn, 3))
        body.append((f"{shape}, {n} tokens of {kv}", *times, seconds(ways["after a restart"][1], 1)))
    return table(
        ("", "cold: llama-server", "pyctl", "next turn: llama-server", "pyctl", "after a restart: pyctl"), body
    )


NAMES = {
    "aider": "Aider",
    "claude code": "Claude Code",
    "cline": "Cline",
    "codex": "Codex",
    "continue": "Continue",
    "mini swe": "mini-swe-agent",
    "open webui": "Open WebUI",
    "opencode": "OpenCode",
    "qwen code": "Qwen Code",
    "sillytavern": "SillyTavern",
    "sub agents": "sub-agents",
}
"""Names of programs; other workloads have theirs from `bench.replay`."""


def evaluated_tokens() -> list[str]:
    body = [
        (NAMES.get(cells[0], cells[0]), cells[5], cells[2], cells[9].partition(" ")[0], cells[8].partition(" ")[0])
        for cells in rows("replay.md", "At 8 GiB of the 27B")[1:]
    ]
    return table(("workload", "llama-server", "pyctl", "seconds: llama-server", "pyctl"), body)


def drafts() -> list[str]:
    """Tokens per second of pyctl and of llama-server after 10,240 tokens, by the tokens that a step yields."""
    lengths = {"2": "length 2", "3": "length 3", "4": "all accepted"}
    cases = {"no drafts": "without drafts", **{name: f"n_max 3, {case}" for name, case in lengths.items()}}
    body = []
    for shape, name in SHAPES.items():
        page, heading = f"gpu-decode-{name}-nextn.md", "Tokens per second, at the length that was asked for"
        body.append((shape, *(" / ".join(row(page, heading, case, "10,240", "1,000")[:2]) for case in cases.values())))
    return table(("tokens per step", *cases), body)


def images() -> list[str]:
    body = []
    for name, request in (("another question", "same image, next question"), ("after a restart", "after a restart")):
        ours, _, peer, *_ = row("gpu-images.md", "Asked about again", request)
        body.append((name, *(f"{cell.partition(' ')[0]} ms" for cell in (peer, ours))))
    what = "first token, question about a 1080p image in 23K tokens, 27B, one H200"
    return table((what, "llama-server", "pyctl"), body)


DOCS = ROOT / "docs"


def models() -> list[str]:
    """Contexts of docs/24gb.md, which the planner computed."""
    context = {name: n for name, n, *_ in rows("24gb.md", "A 24 GB card", DOCS)}
    shown = {
        "Qwen3.6-27B, Qwen3.8-27B": ("27B", "27B, q8_0"),
        "the same, with drafts": ("27B with a head", "27B with a head, q8_0"),
        "Qwen3.6-35B-A3B": ("35B-A3B, with a head or without", "35B-A3B, q8_0"),
    }
    body = [(title, *(context[name] for name in names)) for title, names in shown.items()]
    return table(("tokens of context on 24 GB, Q4_K_M, computed", "f16", "q8_0"), body)


CARD = {
    "defaults": "defaults",
    "defaults, no drafts": "`--spec-type none`",
    "expert": "expert: q8_0, `-np 1`, drafts",
}


def card(shape: str) -> list[str]:
    """The defaults on 24,000 MiB beside the flags of an expert."""
    body = []
    for name, _, context, vram, ram, start, _, cold, turn, speed in rows(
        f"gpu-side-by-side-{SHAPES[shape]}-nextn.md", "On a card of 24 GB"
    )[1:]:
        body.append((CARD[name], context, vram, ram, f"{start} s", f"{cold} s", f"{turn} ms", speed))
    return table((shape, "context", "VRAM", "RAM", "start", "first token", "next turn", "tokens/s"), body)


SWITCHES = {
    "first time": "first prompt",
    "another model and back": "back from the other model",
    "files not in RAM": "back, files not in RAM",
}


def switches() -> list[str]:
    """Seconds to the first token of a request that switches the model, and those of loading."""
    found = json.loads((RESULTS / "gpu-models.json").read_text(encoding="utf-8"))["found"]
    by_way: dict[tuple[str, int], dict[tuple[str, str], str]] = {}
    for record in found:
        if record["way"] in SWITCHES and "size" in record:
            cell = f"{record['first_s']:.1f} ({record['load_s']:.1f})"
            by_way.setdefault((record["way"], record["size"]), {})[record["server"], record["model"]] = cell
    columns = [(server, f"{shape}-nextn") for server in ("llama-server", "pyctl") for shape in SHAPES.values()]
    order = sorted(by_way, key=lambda key: (key[1], list(SWITCHES).index(key[0])))
    body = [(f"{size:,}", SWITCHES[way], *(by_way[way, size].get(key, "") for key in columns)) for way, size in order]
    lines = table(("tokens", "", "llama-server: 27B", "35B-A3B", "pyctl: 27B", "35B-A3B"), body)
    return [lines[0], lines[1].replace("--- | ---:", "---: | ---", 1), *lines[2:]]


FIGURES: dict[str, Callable[[], list[str]]] = {
    "readme-first-token": readme_first_token,
    "models": models,
    "card-27b": lambda: card("27B"),
    "card-35b-a3b": lambda: card("35B-A3B"),
    "first-token": first_tokens,
    "families": families,
    "default-flags": default_flags,
    "long-conversations": long_conversations,
    "evaluated-tokens": evaluated_tokens,
    "drafts": drafts,
    "switches": switches,
    "images": images,
}


def filled(text: str) -> str:
    """``text`` with each table that a comment names written anew."""

    def made(found: re.Match[str]) -> str:
        return "\n".join([found[0].partition("\n")[0], *FIGURES[found[1]](), ""])

    return re.sub(r"^<!-- figures: ([\w-]+) -->\n(?:\|.*\n)*", made, text, flags=re.MULTILINE)


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
