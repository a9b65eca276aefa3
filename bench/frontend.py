"""What other clients cost a running reply: its decode step alone, and beside idle streams and small requests.

    python bench/frontend.py
    python bench/frontend.py --rounds 5 --burst

One reply is generated again and again, in turn alone and under load, on a server that is bound to two cores. Under
load 200 streams wait in the queue, each with a ping every second, and 2,000 requests (/health, /v1/models, /props,
/tokenize) arrive while the reply is made: evenly, or with --burst all at once. The clients run on the other cores if
there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
from common import show
from replay import server

from pyctl.models import TINY_HYBRID, cached_model

N_STREAMS, N_REQUESTS, N_CONNECTIONS = 200, 2000, 16
SHAPE = replace(
    TINY_HYBRID,
    name="frontend",
    embedding=768,
    feed_forward=3072,
    num_heads=12,
    num_kv_heads=2,
    num_key_heads=8,
    num_value_heads=16,
    recurrent_head_size=64,
)
"""Large enough that a step takes some milliseconds on one core."""


def message(path: str, body: object = None) -> bytes:
    """A request as it goes over the wire, on a connection that stays open."""
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    return f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


SMALL = (
    message("/health"),
    message("/v1/models"),
    message("/props"),
    message("/tokenize", {"content": "Some text to be counted, as clients do. " * 4}),
)


@contextlib.asynccontextmanager
async def waiting_streams(host: str, port: int) -> AsyncIterator[None]:
    """200 clients that asked for a stream and wait for their turn."""
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": 1, "sse_ping_interval": 1}
    writers = []
    try:
        for _ in range(N_STREAMS):
            _, writer = await asyncio.open_connection(host, port)
            writers.append(writer)
            writer.write(message("/v1/chat/completions", body))
        yield
    finally:
        for writer in writers:
            writer.close()


async def small_requests(host: str, port: int, seconds: float) -> float:
    """2,000 requests over ``seconds``, or as fast as they are answered; returns the time that they took."""
    began = time.perf_counter()
    numbers = iter(range(N_REQUESTS))
    asked = itertools.cycle(SMALL)

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        for number in numbers:
            due = began + seconds * number / N_REQUESTS
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            writer.write(next(asked))
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"refused: {head!r}")
        writer.close()

    await asyncio.gather(*(connection() for _ in range(N_CONNECTIONS)))
    return time.perf_counter() - began


async def step_ms(client: httpx.AsyncClient, n_tokens: int) -> float:
    """Milliseconds per token of one reply, as the server reports them."""
    body = {"prompt": "Once upon a time", "n_predict": n_tokens, "ignore_eos": True, "temperature": 0}
    reply = await client.post("/completion", json=body)
    return float(reply.json()["timings"]["predicted_per_token_ms"])


async def measure(address: str, seconds: float, rounds: int, burst: bool) -> list[tuple[float, float, float]]:
    """Per round: the step alone, the step under load, and the seconds that the small requests took."""
    host, port = address.removeprefix("http://").split(":")
    found = []
    async with httpx.AsyncClient(base_url=address, timeout=600) as client:
        n_tokens = round(seconds * 1e3 / await step_ms(client, 100))
        for _ in range(rounds):
            alone = await step_ms(client, n_tokens)
            reply = asyncio.ensure_future(step_ms(client, n_tokens))
            await asyncio.sleep(0.2)
            async with waiting_streams(host, int(port)):
                await asyncio.sleep(0.2)
                took = await small_requests(host, int(port), 0 if burst else 0.8 * seconds)
                found.append((alone, await reply, took))
            await asyncio.sleep(0.5)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a reply")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burst", action="store_true", help="the requests come at once instead of evenly")
    parser.add_argument("--keep", action="store_true", help="write results/frontend.md")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as directory:
        model = cached_model(SHAPE, directory)
        os.sched_setaffinity(0, cores[:2])
        command = [sys.executable, "-m", "pyctl", "serve", "-m", str(model), "-c", "16384", "-t", "1", "-np", "1"]
        with server(command, Path(directory) / "log") as address:
            os.sched_setaffinity(0, cores[2:] or cores)
            found = asyncio.run(measure(address, arguments.seconds, arguments.rounds, arguments.burst))
    rows = [
        (number, f"{alone:.2f}", f"{loaded:.2f}", f"{loaded / alone:.3f}", f"{took:.1f}")
        for number, (alone, loaded, took) in enumerate(found, 1)
    ]
    ratio = statistics.median(loaded / alone for alone, loaded, _ in found)
    rows.append(("median", "", "", f"{ratio:.3f}", ""))
    columns = ("round", "step alone, ms", "step under load, ms", "ratio", "2,000 requests took, s")
    manner = "at once" if arguments.burst else "evenly"
    title = f"A decode step beside {N_STREAMS} waiting streams and {N_REQUESTS:,} small requests that come {manner}"
    name = "frontend-burst" if arguments.burst else "frontend"
    show(title, columns, rows, keep=name if arguments.keep else "")


if __name__ == "__main__":
    main()
