"""Agent workloads: prompt tokens evaluated against the floor, for pyctl and, where its binary is given, llama-server.

    python -m bench.replay
    python -m bench.replay --llama-server /path/to/llama-server

The floor of a request is what no earlier prompt of the workload contained, at message granularity: its tokens less the
deepest message boundary that it shares with an earlier prompt. 1.00 means that nothing was evaluated twice; less is
possible where generated text is reused. Both servers run with their defaults on the same model.
"""

from __future__ import annotations

import argparse
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.common import show
from tools.generator import SHAPES, cached_model

Messages = list[dict[str, str]]
Ask = Callable[[Messages], str]
"""Sends a conversation, returns the reply."""

N_CTX, N_PREDICT = 32768, 48


def words(seed: object, n: int) -> str:
    """About n characters of text that starts differently for each seed."""
    rng = random.Random(str(seed))
    text = ""
    while len(text) < n:
        text += "".join(rng.choice("aeioubdfgklmnprst") for _ in range(rng.randint(2, 8))) + " "
    return text[:n]


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


WORKLOADS = (
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


@contextmanager
def server(command: list[str], log: Path) -> Iterator[str]:
    """Run a server on a free port until the block ends; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=out, stderr=out)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended: {log.read_text()[-500:]}")
            time.sleep(0.1)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def replay(address: str, workload: Callable[[Ask], None]) -> tuple[int, int]:
    """(tokens evaluated, floor) of one workload, on a server that has seen nothing of it."""
    client = httpx.Client(base_url=address, timeout=300)
    earlier: list[list[int]] = []
    start = client.post("/tokenize", json={"content": "<|im_start|>", "parse_special": True}).json()["tokens"][0]
    evaluated = floor = 0
    # A salt at the head keeps the workloads apart.
    salt = f"[{workload.__name__}] "

    def ask(messages: Messages) -> str:
        nonlocal evaluated, floor
        messages = [{**messages[0], "content": salt + messages[0]["content"]}, *messages[1:]]
        prompt = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
        tokens = client.post("/tokenize", json={"content": prompt, "parse_special": True}).json()["tokens"]
        boundaries = [i for i, token in enumerate(tokens) if token == start]
        known = max((deepest_shared(tokens, other, boundaries) for other in earlier), default=0)
        floor += len(tokens) - known
        earlier.append(tokens)
        body = {"messages": messages, "max_tokens": N_PREDICT, "temperature": 0}
        reply = client.post("/v1/chat/completions", json=body).json()
        evaluated += reply["timings"]["prompt_n"]
        assert reply["timings"]["prompt_n"] + reply["timings"]["cache_n"] == len(tokens)
        return str(reply["choices"][0]["message"]["content"])

    workload(ask)
    return evaluated, floor


def deepest_shared(tokens: list[int], other: list[int], boundaries: list[int]) -> int:
    """The deepest boundary of ``tokens`` up to which ``other`` is the same."""
    shared = next(
        (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), min(len(tokens), len(other))
    )
    return max((boundary for boundary in boundaries if boundary <= shared), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", metavar="BINARY")
    parser.add_argument("--shape", default="tiny-hybrid", choices=[name for name in SHAPES if name.startswith("tiny")])
    parser.add_argument("--keep", action="store_true", help="write results/replay.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = cached_model(SHAPES[arguments.shape], directory)
        flags = ["-m", str(model), "-c", str(N_CTX), "-t", "1"]
        commands = {"pyctl": [sys.executable, "-m", "pyctl", "serve", *flags]}
        if arguments.llama_server:
            commands["llama-server"] = [arguments.llama_server, *flags]
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for name, command in commands.items():
            with server(command, Path(directory) / f"{name}.log") as address:
                found[name] = {workload.__name__: replay(address, workload) for workload in WORKLOADS}
    rows: list[list[object]] = []
    for workload in [*(workload.__name__ for workload in WORKLOADS), "all"]:
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
