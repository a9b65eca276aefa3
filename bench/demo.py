"""A server on the built-in tiny model, and a conversation through the openai client that outlives two restarts.

    make demo

Each turn is sent as a client sends it and then cold, with `cache_prompt: false`. Before turns 3 and 5 the server is
stopped and started again, so that the cache comes back from disk.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
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


TURNS_PER_RUN = 2
"""Turns between two restarts."""


@contextmanager
def running_server(cache: str) -> Iterator[str]:
    """A `pyctl serve` process on a free port with ``cache`` as its directory; stops it with SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pyctl", "serve", "--port", str(port), "-c", "32768", "--verbosity", "2"]
    command += ["--kv-cache-dir", cache]
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
    rows: list[list[object]] = []
    messages = [{"role": "system", "content": HEAD}]
    with tempfile.TemporaryDirectory() as cache:
        for first in range(0, len(QUESTIONS), TURNS_PER_RUN):
            print("\nstarting pyctl serve on the built-in tiny model", flush=True)
            with running_server(cache) as address:
                client = openai.OpenAI(base_url=address, api_key="none")
                for number in range(first, min(first + TURNS_PER_RUN, len(QUESTIONS))):
                    messages.append({"role": "user", "content": QUESTIONS[number]})
                    reply, timings, warm = turn(client, messages, 40)
                    _, _, cold = turn(client, messages, 1, cache_prompt=False)
                    print(f"\n> {QUESTIONS[number]}\n{reply}", flush=True)
                    messages.append({"role": "assistant", "content": reply})
                    cached, evaluated = timings["cache_n"], timings["prompt_n"]
                    counts = [cached + evaluated, timings["source"], cached, evaluated]
                    rows.append([number + 1, *counts, f"{warm:.0f}", f"{cold:.0f}", f"{cold / warm:.1f}x"])
    print()
    columns = ["turn", "prompt", "from", "cached", "evaluated", "first token ms", "cold ms", "sooner"]
    show("Tokens per turn, and milliseconds to the first token: warm against cold", columns, rows)
    print("The words are gibberish: the weights are random. Tokens, cache and times are real.")


if __name__ == "__main__":
    main()
