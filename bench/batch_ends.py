"""Where batches end: what each rule costs a cold prompt of 32K tokens, and what it saves the turns that follow.

    python -m bench.batch_ends [--keep]

No model: seconds come from batches that were measured on one GPU (results/gpu-batches.md) and on the cores beside it,
tokens from `pyctl.cache.plan.batch_ends` itself. Cold speeds are against full batches of 512 tokens, which are
llama-server's. A line has 16 tokens.
Each turn of a conversation is then regenerated, edited (another last user message), continued after a reply that was
rendered in another way, and continued where a warm-up ended: tokens evaluated against those that are new, and in
brackets turns of 100 that evaluate more than twice the new ones and 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.common import parse, parser_of, show
from pyctl.cache.plan import GPU_BATCH_COST, batch_ends, last_common_end
from pyctl.prompt import Prompt, as_tokens

HEAD, HEADER, LENGTH = 2018, 5, 32768

SIZES = (32, 64, 128, 206, 256, 300, 384, 512, 768, 1024, 1536, 2048)
CPU_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MEASURED = {
    "27b": (SIZES, (30.3, 41.5, 69.3, 102.2, 115.1, 137.7, 159.7, 210.2, 314.7, 415.2, 617.2, 793.4)),
    "35b-a3b": (SIZES, (25.6, 41.1, 69.9, 68.6, 78.2, 77.4, 88.8, 96.2, 122.4, 139.3, 184.1, 226.3)),
    "35b-a3b, cores": (CPU_SIZES, (266, 393, 563, 645, 917, 1105, 1499, 1931, 2781, 3754)),
}
"""Sizes of batches and their milliseconds: on an H200 behind 8,192 tokens; on 128 cores of a Xeon behind 16."""

LINE = 16

SHAPES = {"268/718": (268, 718), "300/300": (300, 300), "40/160": (40, 160), "1500/120": (1500, 120)}
"""Tokens of a user's message (or a tool's result), and of the reply."""


class Rule(NamedTuple):
    """What `batch_ends` is told."""

    name: str
    n_ubatch: int
    cost: int


RULES = (
    Rule("every message", 512, 1),
    Rule("and lines of the first four", 512, 0),
    Rule("every message", 1024, 1),
    Rule("replies only", 1024, 1 << 30),
    Rule("by account", 512, GPU_BATCH_COST),
    Rule("by account", 1024, GPU_BATCH_COST),
    Rule("by account", 2048, GPU_BATCH_COST),
)


def conversation(user: int, reply: int, n: int) -> tuple[list[int], list[int]]:
    """Where messages of users and replies begin in about ``n`` tokens."""
    users = list(range(HEAD, n, user + reply))
    return users, [at + user for at in users]


def prompt_of(users: Sequence[int], replies: Sequence[int], n: int) -> Prompt:
    headers = tuple(at for at in replies if at + HEADER <= n)
    boundaries = sorted({*(at for at in users if at < n), *headers})
    return Prompt(as_tokens(np.zeros(n)), tuple(boundaries), 0, tuple(range(LINE, n, LINE)), headers)


def seconds(model: str, ends: Sequence[int]) -> float:
    """What the batches take one after the other."""
    sizes = np.diff([0, *ends])
    known, ms = MEASURED[model]
    return float((np.interp(sizes, known, ms) * np.maximum(sizes / known[-1], 1)).sum()) / 1e3


class Tally:
    """Tokens evaluated, tokens that are new, and turns that were late."""

    def __init__(self) -> None:
        self.n_turns = self.n_late = self.n_evaluated = self.n_new = 0

    def add(self, n_evaluated: int, n_new: int) -> None:
        self.n_turns += 1
        self.n_late += n_evaluated > 2 * n_new + 64
        self.n_evaluated += n_evaluated
        self.n_new += n_new

    def __str__(self) -> str:
        return f"{self.n_evaluated / self.n_new:.2f} ({100 * self.n_late / self.n_turns:.0f})"


def warm_turns(shape: tuple[int, int], rule: Rule) -> list[Tally]:
    """Regenerated, edited, continued after another rendering of the reply, continued after a warm-up."""
    users, replies = conversation(*shape, LENGTH)
    tallies = [Tally() for _ in range(4)]
    for k in range(len(users) - 1):
        n, n_next = replies[k] + HEADER, replies[k + 1] + HEADER
        ends, later = (
            batch_ends(prompt_of(users, replies, m), rule.n_ubatch, batch_cost=rule.cost) for m in (n, n_next)
        )
        for tally, of, size, shared in zip(
            tallies, (ends, ends, later, later), (n, n, n_next, n_next),
            (replies[k], users[k], replies[k], users[k + 1]), strict=True,
        ):  # fmt: skip
            tally.add(size - last_common_end(of, ends if shared <= n else later, min(shared, size - 1)), size - shared)
    return tallies


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(parser_of(__doc__), argv)
    rows: list[list[object]] = []
    for name, shape in SHAPES.items():
        users, replies = conversation(*shape, LENGTH)
        prompt = prompt_of(users, replies, LENGTH)
        full = list(range(512, LENGTH + 1, 512))
        for rule in RULES:
            ends = batch_ends(prompt, rule.n_ubatch, batch_cost=rule.cost)
            speeds = [f"{seconds(model, full) / seconds(model, ends):.2f}" for model in MEASURED]
            shown = name if rule is RULES[0] else ""
            rows.append([shown, rule.name, rule.n_ubatch, len(ends), *speeds, *warm_turns(shape, rule)])
    columns = ["user/reply", "a batch ends at", "-ub", "batches", *MEASURED]
    columns += ["regenerate", "edit", "reply anew", "after a warm-up"]
    title = "Where batches end: cold speed of 32K tokens, and what turns evaluate"
    show(title, columns, rows, keep="batch-ends" if arguments.keep else "")


if __name__ == "__main__":
    main()
