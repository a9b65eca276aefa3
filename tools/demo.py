"""A server on the built-in model, and a conversation through the openai client that outlives two
restarts.

    make demo                                  # or: python -m tools.demo [--svg docs/demo.svg]

Each turn is sent as a client sends it and then cold, with `cache_prompt: false`; the two replies
must be equal. Before turns 3 and 5 the server is stopped and started again, so that the cache comes
back from disk.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess

HEAD = "You are the keeper of a long manual. " + " ".join(
    f"Rule {i}: valve {i * 7 % 97} opens at noon." for i in range(1, 501)
)
TURNS = (
    "Hello! My cat is called Miro. The code of the north door is 4821.",
    "What can you do?",
    "What is the code of the north door?",
    "Actually, the code of the north door is 7305.",
    "What is the code of the north door?",
    "And what is my cat called?",
)
RESTARTS = (2, 4)
"""Turns, from 0, before which the server is stopped and started again."""


def turn(client: openai.OpenAI, messages: Any, **extra: Any) -> tuple[str, dict[str, Any], float]:
    """Stream a reply. Return its text, its timings and its source, and milliseconds to the first
    token at the client.
    """
    began = time.perf_counter()
    first = 0.0
    text = ""
    timings: dict[str, Any] = {}
    stream: openai.Stream[ChatCompletionChunk] = client.chat.completions.create(
        model="built-in",
        messages=messages,
        stream=True,
        max_tokens=60,
        temperature=0,
        extra_body=extra,
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - began
            text += chunk.choices[0].delta.content
        timings = (chunk.model_extra or {}).get("timings") or timings
    source = stream.response.headers["x-pyctl-cache"].partition(";")[0].removeprefix("source=")
    return text, {**timings, "source": source}, first * 1e3


def sooner(n_cached: int, warm_ms: float, cold_ms: float) -> str:
    """Return the ratio by which the first token came sooner; "" if nothing was restored: both runs
    were cold then.
    """
    return f"{cold_ms / warm_ms:.1f}x" if n_cached else ""


def converse(console: Console, cache: str) -> list[list[object]]:
    """Hold the conversation; one row of numbers per turn. SystemExit if a reply is not a cold
    run's.
    """
    rows: list[list[object]] = []
    messages = [{"role": "system", "content": HEAD}]
    starts = (0, *RESTARTS, len(TURNS))
    for first, last in itertools.pairwise(starts):
        again = "stopped; " if first else ""
        console.print(
            f"\n[dim]{again}pyctl serve --kv-cache-dir {'(the same)' if first else 'DIR'}[/]"
        )
        with ServerProcess([*PYCTL_SERVE, "--kv-cache-dir", cache], Path(f"{cache}.log")) as server:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
            for number in range(first, last):
                messages.append({"role": "user", "content": TURNS[number]})
                reply, timings, warm = turn(client, messages)
                cold_reply, _, cold = turn(client, messages, cache_prompt=False)
                if reply != cold_reply:
                    raise SystemExit(
                        f"turn {number + 1} differs from a cold run: {reply!r}, {cold_reply!r}"
                    )
                messages.append({"role": "assistant", "content": reply})
                cached = timings["cache_n"]
                evaluated = timings["prompt_n"]
                source = timings["source"]
                came = f"{cached} tokens from {source}, " if cached else ""
                console.print(f"[bold cyan]>[/] [bold]{TURNS[number]}[/]")
                console.print(Padding(reply, (0, 0, 0, 2)))
                drafted = timings.get("draft_n", 0)
                accepted = (
                    f", {timings['draft_n_accepted']} of {drafted} drafts accepted"
                    if drafted
                    else ""
                )
                console.print(
                    f"  [dim]{came}{evaluated} evaluated, first token after {warm:.0f} "
                    f"ms{accepted}[/]"
                )
                counts = [cached + evaluated, source, cached, evaluated]
                rows.append(
                    [number + 1, *counts, f"{warm:.0f}", f"{cold:.0f}", sooner(cached, warm, cold)]
                )
            client.close()
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Print the conversation and a table of tokens and milliseconds per turn. SystemExit if a reply
    is not a cold run's.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="also write the output as a picture"
    )
    args = parser.parse_args(argv)
    console = Console(width=96, record=args.svg is not None, highlight=False)
    console.print(
        f"The system message is a manual of {HEAD.count('Rule')} rules. [dim]Model: built-in.[/]"
    )
    with tempfile.TemporaryDirectory() as directory:
        rows = converse(console, f"{directory}/cache")
    table = Table(
        title="Tokens per turn, and milliseconds to the first token: warm against cold",
        title_justify="left",
    )
    for name in (
        "turn",
        "prompt",
        "from",
        "cached",
        "evaluated",
        "first token ms",
        "cold ms",
        "sooner",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print()
    console.print(table)
    console.print("Every reply equals a cold run's.")
    if args.svg is not None:
        console.save_svg(str(args.svg), title="make demo")


if __name__ == "__main__":
    main()
