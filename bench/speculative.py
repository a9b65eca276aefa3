"""The gain of drafts: their accepted share, and tokens per second with and without them.

    python -m bench.speculative [--keep]
    python -m bench.speculative -m model.gguf --types none draft-mtp "draft-mtp --exact" ngram-mod

Each question of the recall benchmark goes to one server per way of drafting, one after the other. Speeds are those of
each reply's fastest run, since other load on the machine makes no reply faster.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from gguf import GGUFReader

from bench.common import add_model, parse, parser_of, show, shown
from bench.recall import Messages, prompts
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from pyctl.models import builtin_model


def types_of(model: str) -> list[str]:
    """Ways of drafting that are worth a look with this model; with --exact there are drafts in every step."""
    heads = [field for name, field in GGUFReader(model).fields.items() if name.endswith(".nextn_predict_layers")]
    headed = any(field.contents() for field in heads)
    return ["none", *(["draft-mtp", "draft-mtp --exact"] if headed else []), "ngram-mod", "cache"]


def asked(url: str, messages: Messages, n: int) -> dict[str, Any]:
    """The greedy reply with its timings."""
    body = {"messages": messages, "max_tokens": n, "temperature": 0}
    reply: dict[str, Any] = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
    return {"text": reply["choices"][0]["message"]["content"], "draft_n": 0, "draft_n_accepted": 0, **reply["timings"]}


def rate(rounds: Sequence[list[dict[str, Any]]]) -> float:
    """Tokens per second of the replies, each at its fastest."""
    fastest = [min(each, key=lambda reply: float(reply["predicted_ms"])) for each in zip(*rounds, strict=True)]
    return float(sum(r["predicted_n"] - 1 for r in fastest) / sum(r["predicted_ms"] for r in fastest) * 1e3)


def row(name: str, rounds: Sequence[list[dict[str, Any]]], base: Sequence[list[dict[str, Any]]]) -> list[object]:
    """One line of the table; ``base`` are the same replies without drafts."""
    replies = [reply for each in rounds for reply in each]
    n, drafted = sum(r["predicted_n"] - 1 for r in replies), sum(r["draft_n"] for r in replies)
    accepted = sum(r["draft_n_accepted"] for r in replies)
    same = sum(a["text"] == b["text"] for a, b in zip(rounds[0], base[0], strict=True))
    return [
        name,
        f"{accepted / drafted:.1%}" if drafted else "",
        f"{n / max(n - accepted, 1):.2f}",
        shown(rate(rounds)),
        f"{rate(rounds) / rate(base):.2f}",
        f"{same} of {len(base[0])}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_model(parser, str(builtin_model()))
    parser.set_defaults(threads=1)
    parser.add_argument("--types", nargs="+", help="values of --spec-type, and more flags; default: all supported ones")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each conversation")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("-n", type=int, default=64)
    options = parse(parser, argv, questions=2, repeat=1, n=16)
    types = options.types or types_of(options.model)
    each = min(options.questions, 8)
    questions = [
        messages for seed in range(-(-options.questions // each)) for messages, _ in prompts(seed, options.tokens, each)
    ]
    rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in types}
    with ExitStack() as opened:
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        flags = ["-m", options.model, "-c", "16384", "-t", str(options.threads), "-np", "1"]
        servers = {
            name: opened.enter_context(
                ServerProcess([*PYCTL_SERVE, *flags, "--spec-type", *name.split()], directory / f"{name}.log")
            )
            for name in types
        }
        for number in range(options.repeat + 1):
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in types}
            for turn, messages in enumerate(questions):
                first = (number + turn) % len(types)  # the order changes, so that no type always follows the same one
                for name in (*types[first:], *types[:first]):
                    found[name].append(asked(servers[name].url, messages, options.n))
            for name in types if number else ():  # the first round evaluates the prompts
                rounds[name].append(found[name])
    columns = ["drafts from", "accepted", "tokens a step", "tokens/s", "times without", "same replies as without"]
    rows = [row(name, each_round, rounds[types[0]]) for name, each_round in rounds.items()]
    title = f"Speculative decoding, {Path(options.model).stem}"
    show(title, columns, rows, keep="speculative" if options.keep else "")


if __name__ == "__main__":
    main()
