"""First token of the next turn after a reply that the template shortens: with the warm-up, without, and llama-server.

    python -m bench.warm                                          # a tiny hybrid
    python -m bench.warm -m model.gguf --head 32768 --pause 3 --llama-server FILE --flags="-ngl 99 -ub 512"

The template leaves out the reasoning of earlier turns, as Qwen's do. So the next prompt differs from the live sequence
where the reply began, and the server evaluates the reply again. The warm-up does that in the pause between two turns;
"at once" has no pause, so there the warm-up can only delay the turn.
"""

from __future__ import annotations

import shlex
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.budgets import TEMPLATE
from bench.common import add_model, parse, parser_of, show, words
from bench.gpu.servers import Messages, Reply, Server, llama_server, pyctl
from tools.generator import SHAPES, cached_model

QUESTION = 60
"""Tokens of what a user says, about."""


def conversation(
    server: Server, *, head: int, n_turns: int, thought: int, reply: int, pause: float, question: int
) -> list[Reply]:
    """The replies to each turn but the first; a client that forgets the reasoning."""
    letters = 4000 / len(server.post("/tokenize", {"content": words("sample", 4000)})["tokens"])
    messages: Messages = [{"role": "system", "content": words("head", int(head * letters))}]
    found = []
    for turn in range(n_turns + 1):
        messages.append({"role": "user", "content": words(f"question {turn}", int(question * letters))})
        limits = {"reasoning_budget_tokens": thought, "ignore_eos": True}
        n = thought + reply if turn < n_turns else 2  # of the last turn only the beginning is of interest
        answer = server.ask(messages, n, **limits, chat_template_kwargs={"enable_thinking": True})
        if turn < n_turns and not answer.text:
            raise SystemExit(f"{server.name} thought all the time")
        messages.append({"role": "assistant", "content": answer.text})
        found.append(answer)
        time.sleep(pause)
    return found[1:]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_model(parser, None)
    parser.add_argument("--llama-server", metavar="FILE")
    parser.add_argument("--template", default=str(TEMPLATE), help="a chat template that leaves out earlier thoughts")
    parser.add_argument("--head", type=int, default=2048, help="approximate tokens of the system message")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--thought", type=int, default=300, help="tokens of reasoning in each reply")
    parser.add_argument("--reply", type=int, default=700, help="tokens of each reply after its reasoning")
    parser.add_argument("--pause", type=float, default=4.0, help="seconds between a reply and the next turn")
    parser.add_argument("--flags", default="", help="flags of both servers, such as --flags='-ngl 99'")
    small = {"head": 200, "turns": 1, "thought": 40, "reply": 60, "pause": 1.0, "threads": 1}
    arguments = parse(parser, argv, **small)
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = arguments.model or str(cached_model(SHAPES["tiny-hybrid"], directory))
        flags = ["-m", model, "-c", str(2 * (arguments.head + 4096 * (1 + arguments.turns))), "-np", "1", "--jinja"]
        flags += ["-t", str(arguments.threads)] if arguments.threads > 0 else []
        flags += ["--chat-template-file", arguments.template] if Path(arguments.template).is_file() else []
        flags += shlex.split(arguments.flags)
        ways = [
            ("pyctl", arguments.pause, pyctl(flags, None, directory / "warm.log")),
            ("pyctl, at once", 0.0, pyctl(flags, None, directory / "at-once.log")),
            ("pyctl --no-warm-next", 0.0, pyctl([*flags, "--no-warm-next"], None, directory / "cold.log")),
        ]
        if arguments.llama_server:
            ways.append(("llama-server", 0.0, llama_server(arguments.llama_server, flags, directory / "llama.log")))
        times: list[float] = []
        for way, pause, server in ways:
            with server:
                replies = conversation(
                    server,
                    head=arguments.head,
                    n_turns=arguments.turns,
                    thought=arguments.thought,
                    reply=arguments.reply,
                    pause=pause,
                    question=QUESTION,
                )
            first = statistics.median(reply.first_ms for reply in replies)
            times.append(first)
            evaluated = statistics.median(reply.evaluated for reply in replies)
            warmed = statistics.median(int(reply.timings.get("warmed_n", 0)) for reply in replies)
            rows.append([way, f"{pause:g}", f"{evaluated:.0f}", f"{warmed:.0f}", f"{first:.1f}"])
        for row, first in zip(rows, times, strict=True):
            row.append(f"{first / times[0]:.2f}x")
    title = f"Next turn after {arguments.thought} tokens of thought and {arguments.reply} of reply"
    columns = ["server", "pause s", "evaluated", "warmed", "first token ms", "of the first row"]
    show(title, columns, rows, keep="warm" if arguments.keep else "")


if __name__ == "__main__":
    main()
