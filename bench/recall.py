"""How often the built-in model gives back what it was told, and whether a restored conversation answers differently.

    python -m bench.recall [--keep]

Conversations are those of the training's generator, with held-out names and values. Each question is asked of the
whole conversation cold, then from the cache (after the other questions), then after a restart, from disk.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from random import Random

import httpx

from bench.common import show
from bench.demo import running_server
from tools.training.dialogue import needles

SIZES = ((1024, 10, 8, 8), (4096, 12, 8, 4), (16_384, 6, 8, 8), (65_536, 1, 8, 1))
"""Tokens, conversations, questions in each, and how many of those are asked cold, too."""

Messages = list[dict[str, str]]


def prompts(seed: int, tokens: int, count: int) -> list[tuple[Messages, str]]:
    """One conversation with each of its questions and the right answers."""
    messages, questions = needles(Random(f"{seed} recall bench {tokens}"), tokens, count)
    plain = [{"role": message.role, "content": message.text} for message in messages]
    head = plain[: questions[0].index - 1]
    return [([*head, plain[question.index - 1]], plain[question.index]["content"]) for question in questions]


def reply_to(address: str, messages: Messages, **fields: object) -> str:
    """The greedy reply."""
    body = {"messages": messages, "max_tokens": 48, "temperature": 0, **fields}
    reply = httpx.post(f"{address}/chat/completions", json=body, timeout=600).json()
    return str(reply["choices"][0]["message"]["content"])


def measure(tokens: int, conversations: int, count: int, num_cold: int) -> list[object]:
    """One row of the table."""
    asked = [pair for seed in range(conversations) for pair in prompts(seed, tokens, count)]
    chosen = [number for number in range(len(asked)) if number % count < num_cold]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        flags = ("-c", "81920", "--kv-cache-budget", "16384", "--cache-ram", "-1", "--prefix-cache-slots", "256")
        with running_server(cache, *flags) as address:
            cold = {number: reply_to(address, asked[number][0], cache_prompt=False) for number in chosen}
            warm = [reply_to(address, messages) for messages, _ in asked]
        with running_server(cache, *flags) as address:
            disk = [reply_to(address, messages) for messages, _ in asked]
    spent = time.perf_counter() - began
    right = sum(reply == asked[number][1] for number, reply in cold.items())
    same = sum(reply == warm[number] == disk[number] for number, reply in cold.items())
    scores = [sum(reply == answer for reply, (_, answer) in zip(way, asked, strict=True)) for way in (warm, disk)]
    return [
        tokens,
        f"{right} of {len(cold)} ({right / len(cold):.1%})",
        *(f"{score} of {len(asked)} ({score / len(asked):.1%})" for score in scores),
        f"{same} of {len(cold)}",
        sum(old == new for old, new in zip(warm, disk, strict=True)),
        f"{spent:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="write the table to bench/results")
    parser.add_argument("--longest", type=int, default=16_384, metavar="TOKENS")
    args = parser.parse_args()
    rows = [measure(*size) for size in SIZES if size[0] <= args.longest]
    columns = ["tokens", "right, cold", "right, cached", "right, from disk", "all three equal", "last two equal", "s"]
    title = "Questions about held-out facts told in the conversation: replies that are right to the letter"
    show(title, columns, rows, keep="recall" if args.keep else "")


if __name__ == "__main__":
    main()
