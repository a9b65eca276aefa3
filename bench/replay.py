"""Agent workloads: prompt tokens evaluated against the floor, for pyctl and, where its binary is given, llama-server.

    python -m bench.replay
    python -m bench.replay --llama-server /path/to/llama-server

The floor of a request is what no earlier prompt of the workload contained, at message granularity: its tokens less the
deepest message boundary that it shares with an earlier prompt. 1.00 means that nothing was evaluated twice; less is
possible where generated text is reused. Both servers run with their defaults on the same model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.common import parse, parser_of, show, words
from tools.generator import SHAPES, cached_model
from tools.server_process import PYCTL_SERVE, ServerProcess

Messages = list[dict[str, str]]
Ask = Callable[[Messages], str]
"""Sends a conversation, returns the reply."""

N_CTX, N_PREDICT = 32768, 48


def system(name: str, n: int = 3000) -> dict[str, str]:
    return {"role": "system", "content": words(f"system {name}", n)}


def user(seed: object, n: int = 240) -> dict[str, str]:
    return {"role": "user", "content": words(f"user {seed}", n)}


def turn(ask: Ask, conversation: Messages, message: dict[str, str]) -> None:
    conversation.append(message)
    conversation.append({"role": "assistant", "content": ask(conversation)})


def growing(ask: Ask) -> None:
    conversation = [system("a")]
    for i in range(10):
        turn(ask, conversation, user(i))


def shortened(ask: Ask) -> None:
    conversation = [system("a")]
    for i in range(6):
        turn(ask, conversation, user(i))
    conversation = conversation[:3]
    turn(ask, conversation, user("follow-up"))
    turn(ask, conversation, user("and another"))


def alternating(ask: Ask) -> None:
    conversations = [[system("shared")] for _ in range(3)]
    for round_ in range(5):
        for i, conversation in enumerate(conversations):
            turn(ask, conversation, user((i, round_)))


def fan_out(ask: Ask) -> None:
    for i in range(12):
        turn(ask, [system("long", 8000)], user(i))


def dynamic_tail(ask: Ask) -> None:
    for i in range(12):
        question = {"role": "user", "content": f"{words('stable', 400)}\n{words(('found', i), 900)}"}
        turn(ask, [system("rag"), user("rules", 600), {"role": "assistant", "content": "Understood."}], question)


def branching(ask: Ask) -> None:
    conversation = [system("a")]
    for i in range(5):
        turn(ask, conversation, user(i))
    edited = conversation[:5]
    for i in range(3):
        turn(ask, edited, user(("edited", i)))
    turn(ask, conversation, user("back on the first branch"))
    turn(ask, edited, user("and on the second"))


def titles(ask: Ask) -> None:
    conversation = [system("a")]
    for i in range(8):
        turn(ask, conversation, user(i))
        title = {"role": "user", "content": "Title for: " + conversation[-2]["content"] + conversation[-1]["content"]}
        ask([{"role": "system", "content": words("title writer", 300)}, title])


def regenerate(ask: Ask) -> None:
    conversation = [system("a")]
    turn(ask, conversation, user(0))
    for _ in range(4):
        ask([*conversation, user(1)])


def tool_loop(ask: Ask) -> None:
    conversation = [system("agent", 6000), user("task", 500)]
    for i in range(20):
        reply = ask(conversation)
        conversation += [{"role": "assistant", "content": reply}, {"role": "tool", "content": words(("result", i), 60)}]


def sub_agents(ask: Ask) -> None:
    main = [system("agent", 6000)]
    for i in range(3):
        turn(ask, main, user(i))
        for j in range(3):
            helper = [system("helper", 2000)]
            for k in range(3):
                turn(ask, helper, user((i, j, k)))
        turn(ask, main, user(("result", i)))


WORKLOADS: dict[str, Callable[[Ask], None]] = {
    workload.__name__: workload
    for workload in (
        growing,
        shortened,
        alternating,
        fan_out,
        sub_agents,
        dynamic_tail,
        branching,
        titles,
        regenerate,
        tool_loop,
    )
}


def replay(client: httpx.Client, name: str) -> tuple[int, int]:
    """(tokens evaluated, floor) of the workload ``name``, asked of a server that has seen nothing of it."""
    earlier: list[list[int]] = []
    evaluated = floor = 0

    def post(path: str, **body: object) -> Any:
        return client.post(path, json=body).raise_for_status().json()

    # A salt at the head keeps the workloads apart.
    salt = f"[{name}] "
    start = post("/tokenize", content="<|im_start|>", parse_special=True)["tokens"][0]

    def ask(messages: Messages) -> str:
        nonlocal evaluated, floor
        messages = [{**messages[0], "content": salt + messages[0]["content"]}, *messages[1:]]
        prompt = post("/apply-template", messages=messages)["prompt"]
        tokens = post("/tokenize", content=prompt, parse_special=True)["tokens"]
        boundaries = [i for i, token in enumerate(tokens) if token == start]
        known = max((deepest_shared(tokens, other, boundaries) for other in earlier), default=0)
        floor += len(tokens) - known
        earlier.append(tokens)
        reply = post("/v1/chat/completions", messages=messages, max_tokens=N_PREDICT, temperature=0)
        evaluated += reply["timings"]["prompt_n"]
        if reply["timings"]["prompt_n"] + reply["timings"]["cache_n"] != len(tokens):
            raise SystemExit(f"{reply['timings']} do not add up to {len(tokens)} tokens")
        return str(reply["choices"][0]["message"]["content"])

    WORKLOADS[name](ask)
    return evaluated, floor


def deepest_shared(tokens: list[int], other: list[int], boundaries: list[int]) -> int:
    """The deepest boundary of ``tokens`` up to which ``other`` is the same."""
    shared = next(
        (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), min(len(tokens), len(other))
    )
    return max((boundary for boundary in boundaries if boundary <= shared), default=0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--llama-server", metavar="BINARY")
    parser.add_argument("--shape", default="tiny-hybrid", choices=[name for name in SHAPES if name.startswith("tiny")])
    parser.add_argument("--only", nargs="+", default=list(WORKLOADS), choices=WORKLOADS, metavar="WORKLOAD")
    arguments = parse(parser, argv, only=["shortened"])
    with tempfile.TemporaryDirectory() as directory:
        model = cached_model(SHAPES[arguments.shape], directory)
        flags = ["-m", str(model), "-c", str(N_CTX), "-t", "1"]
        commands = {"pyctl": [*PYCTL_SERVE, *flags]}
        if arguments.llama_server:
            commands["llama-server"] = [arguments.llama_server, *flags]
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for name, command in commands.items():
            with (
                ServerProcess(command, Path(directory) / f"{name}.log") as server,
                httpx.Client(base_url=server.url, timeout=300) as client,
            ):
                found[name] = {workload: replay(client, workload) for workload in arguments.only}
    rows: list[list[object]] = []
    for workload in [*arguments.only, "all"]:
        row: list[object] = [workload.replace("_", " ")]
        for results in found.values():
            counts = results.values() if workload == "all" else [results[workload]]
            evaluated, floor = sum(count[0] for count in counts), sum(count[1] for count in counts)
            row += [floor, evaluated, f"{evaluated / floor:.2f}"]
        rows.append(row)
    columns = ["workload"]
    for name in found:
        columns += [f"{name}: floor", "evaluated", "ratio"]
    show("Prompt tokens evaluated against the floor", columns, rows, keep="replay" if arguments.keep else "")


if __name__ == "__main__":
    main()
