"""A server on the built-in tiny model, and a short conversation through the openai client: each turn warm, then cold.

    make demo

warm: the turn as a client sends it; the cache restores what it knows. cold: the same prompt with `cache_prompt: false`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import openai
from common import show

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = "You are the keeper of a long manual. " + " ".join(
    f"Rule {i}: valve {i * 7 % 97} opens at noon." for i in range(250)
)
QUESTIONS = (
    "Which valve does rule 12 speak of?",
    "And the one after it?",
    "Please repeat your first answer, word for word.",
    "Then summarise the manual in one line.",
    "Thank you. Which rule was the last?",
)


@contextmanager
def running_server() -> Iterator[str]:
    """A `pyctl serve` process on a free port; yields its address and stops it with SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pyctl", "serve", "--port", str(port), "-c", "32768", "--verbosity", "2"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_ARG_", "PYCTL_"))}
    process = subprocess.Popen(command, env=environment)
    try:
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as attempt:
                if attempt.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start; see above")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def turn(
    client: openai.OpenAI, messages: list[dict[str, str]], n: int, **extra: Any
) -> tuple[str, dict[str, Any], float]:
    """One streamed reply: its text, llama-server's timings, and milliseconds to the first token as the client saw."""
    began, first, text, timings = time.perf_counter(), 0.0, "", {}
    stream = client.chat.completions.create(
        model="built-in", messages=messages, stream=True, max_tokens=n, temperature=0, extra_body=extra
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - began
            text += chunk.choices[0].delta.content
        timings = (chunk.model_extra or {}).get("timings") or timings
    return text, timings, first * 1e3


def main() -> None:
    print("starting pyctl serve on the built-in tiny model", flush=True)
    rows: list[list[object]] = []
    with running_server() as address:
        client = openai.OpenAI(base_url=address, api_key="none")
        messages = [{"role": "system", "content": HEAD}]
        for number, question in enumerate(QUESTIONS, 1):
            messages.append({"role": "user", "content": question})
            _, _, cold = turn(client, messages, 1, cache_prompt=False)
            reply, timings, warm = turn(client, messages, 40)
            print(f"\n> {question}\n{reply}", flush=True)
            messages.append({"role": "assistant", "content": reply})
            cached, evaluated = timings["cache_n"], timings["prompt_n"]
            speedup = f"{cold / warm:.1f}x"
            rows.append([number, cached + evaluated, cached, evaluated, f"{warm:.0f}", f"{cold:.0f}", speedup])
    print()
    columns = ["turn", "prompt", "cached", "evaluated", "first token ms", "cold ms", "sooner"]
    show("Tokens per turn, and milliseconds to the first token: warm against cold", columns, rows)
    print("The words are gibberish: the weights are random. Tokens, cache and times are real.")


if __name__ == "__main__":
    main()
