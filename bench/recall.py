"""How often the built-in model recalls facts, and whether a restored conversation answers differently.

    python -m bench.recall [--keep]
    python -m bench.recall --longest 4096 --kv-pool 40960     # with a pool alone

Conversations are those of the training's generator, with held-out names and values. Each question is asked
after the whole conversation: cold, then from the cache (after the other questions), then from disk after a restart.
Words are those of the training, or others that it never used; conversations in other words contain the model's own
replies.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random

import httpx

from bench.common import parse, parser_of, show
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from tools.training.needles import needles

SIZES = (
    (1024, False, 10, 8, 8),
    (1024, True, 20, 8, 4),
    (4096, False, 12, 8, 4),
    (4096, True, 6, 8, 4),
    (16_384, False, 6, 8, 8),
    (65_536, False, 1, 8, 1),
)
"""Tokens, whether in other words, conversations, questions in each, and how many of those are asked cold, too."""

LEAST_POOL = "40960"
"""Of 81,920 tokens on the device: one of the built-in model's two layers of attention."""

LONGEST_BESIDE = 4096
"""Tokens of the longest conversations that are held with a pool, too."""

Messages = list[dict[str, str]]


def prompts(seed: int, tokens: int, count: int, *, paraphrased: bool = False) -> list[tuple[Messages, str]]:
    """One conversation with each of its questions and the right answers."""
    messages, questions = needles(Random(f"{seed} recall bench {tokens}"), tokens, count, paraphrased=paraphrased)
    plain = [{"role": message.role, "content": message.text} for message in messages]
    head = plain[: questions[0].index - 1]
    return [([*head, plain[question.index - 1]], plain[question.index]["content"]) for question in questions]


def held(address: str, messages: Messages) -> Messages:
    """The same conversation with the server's own replies."""
    spoken: Messages = []
    for message in messages:
        own = message["role"] == "assistant"
        spoken.append({**message, "content": reply_to(address, spoken)} if own else message)
    return spoken


def reply_to(address: str, messages: Messages, **fields: object) -> str:
    """The greedy reply."""
    body = {"messages": messages, "max_tokens": 48, "temperature": 0, **fields}
    reply = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
    return str(reply["choices"][0]["message"]["content"])


def measure(
    tokens: int, paraphrased: bool, conversations: int, count: int, num_cold: int, more: Sequence[str] = ()
) -> list[object]:
    """One row of the table; ``more`` are flags of the server."""
    seeds = range(conversations)
    asked = [pair for seed in seeds for pair in prompts(seed, tokens, count, paraphrased=paraphrased)]
    chosen = [number for number in range(len(asked)) if number % count < num_cold]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--kv-cache-budget", "16384", "--cache-ram", "-1", "--prefix-cache-slots", "256"]
        command = [*PYCTL_SERVE, "-c", "81920", "-t", "1", "--kv-cache-dir", f"{directory}/cache", *flags, *more]
        server = ServerProcess(command, Path(directory) / "log")
        with server:
            if paraphrased:
                for first in range(0, len(asked), count):
                    head = held(server.url, asked[first][0][:-1])
                    asked[first : first + count] = [
                        ([*head, messages[-1]], answer) for messages, answer in asked[first : first + count]
                    ]
            cold = {number: reply_to(server.url, asked[number][0], cache_prompt=False) for number in chosen}
            warm = [reply_to(server.url, messages) for messages, _ in asked]
        with server:
            disk = [reply_to(server.url, messages) for messages, _ in asked]
    spent = time.perf_counter() - began
    right = sum(reply == asked[number][1] for number, reply in cold.items())
    same = sum(reply == warm[number] == disk[number] for number, reply in cold.items())
    scores = [sum(reply == answer for reply, (_, answer) in zip(way, asked, strict=True)) for way in (warm, disk)]
    return [
        tokens,
        "other" if paraphrased else "trained",
        f"{right} of {len(cold)} ({right / len(cold):.1%})",
        *(f"{score} of {len(asked)} ({score / len(asked):.1%})" for score in scores),
        f"{same} of {len(cold)}",
        sum(old == new for old, new in zip(warm, disk, strict=True)),
        f"{spent:.0f}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--longest", type=int, default=16_384, metavar="TOKENS")
    parser.add_argument("--conversations", type=int, metavar="N", help="conversations of each size, at most")
    parser.add_argument("--questions", type=int, metavar="N", help="questions in each conversation, at most")
    parser.add_argument("--kv-pool", nargs="+", default=["off", LEAST_POOL], help="values of the server's flag")
    args = parse(parser, argv, longest=1024, conversations=1, questions=2)
    chosen = [size for size in SIZES if size[0] <= args.longest]
    rows = []
    for pool, (n, paraphrased, conversations, questions, cold) in product(args.kv_pool, chosen):
        if len(args.kv_pool) > 1 and pool != "off" and (paraphrased or n > LONGEST_BESIDE):
            continue
        most = min(args.questions or questions, questions)
        count = min(args.conversations or conversations, conversations)
        rows.append([pool, *measure(n, paraphrased, count, most, min(cold, most), ["--kv-pool", pool])])
    columns = [
        "pool",
        "tokens",
        "words",
        "right, cold",
        "right, cached",
        "right, from disk",
        "all three equal",
        "last two equal",
        "s",
    ]
    title = "Questions about held-out facts told in the conversation: replies that are right to the letter"
    show(title, columns, rows, keep="recall" if args.keep else "")


if __name__ == "__main__":
    main()
