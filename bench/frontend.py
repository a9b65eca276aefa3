"""Tokens per second of a reply: alone, and beside waiting streams and small requests of other clients.

    python -m bench.frontend

A server bound to two cores streams one long reply, in turn alone and under load. The load is 200 streams that wait in
the queue, each with a ping every second, and in all 2,000 requests (/health, /v1/models, /props, /tokenize) at even
distances. Neighbouring times are compared, so that a busy machine affects both sides alike. The clients run on other
cores if there are any; if not, their work counts as load, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import httpx

from bench.common import parse, parser_of, show
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from tools.generator import TINY_HYBRID, cached_model

N_CONNECTIONS = 16
SETTLE_SECONDS = 0.5
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
async def waiting_streams(host: str, port: int, count: int) -> AsyncIterator[None]:
    """``count`` clients that asked for a stream and wait for their turn."""
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": 1, "sse_ping_interval": 1}
    writers = []
    try:
        for _ in range(count):
            _, writer = await asyncio.open_connection(host, port)
            writers.append(writer)
            writer.write(message("/v1/chat/completions", body))
        yield
    finally:
        for writer in writers:
            writer.close()


async def small_requests(host: str, port: int, count: int, seconds: float) -> None:
    """``count`` requests spread over ``seconds``."""
    began = time.perf_counter()
    numbers = iter(range(count))
    asked = itertools.cycle(SMALL)

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        for number in numbers:
            await asyncio.sleep(max(began + seconds * number / count - time.perf_counter(), 0))
            writer.write(next(asked))
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"refused: {head!r}")
        writer.close()

    await asyncio.gather(*(connection() for _ in range(N_CONNECTIONS)))


class Load(NamedTuple):
    """Waiting streams, and small requests in one round."""

    streams: int
    requests: int


class Reply:
    """A reply without an end, and the number of its tokens so far."""

    def __init__(self) -> None:
        self.n_tokens = 0

    async def read(self, address: str) -> None:
        body = {"prompt": "Once upon a time", "n_predict": -1, "ignore_eos": True, "temperature": 0, "stream": True}
        async with (
            httpx.AsyncClient(base_url=address, timeout=600) as client,
            client.stream("POST", "/completion", json=body) as response,
        ):
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    self.n_tokens += len(json.loads(line[6:])["tokens"])

    async def rate(self, seconds: float) -> float:
        """Tokens per second from now on."""
        began, before = time.perf_counter(), self.n_tokens
        await asyncio.sleep(seconds)
        return (self.n_tokens - before) / (time.perf_counter() - began)


async def compared(
    address: str, load: Callable[[], AbstractAsyncContextManager[object]], seconds: float, rounds: int, settle: float
) -> list[tuple[float, float, float]]:
    """Tokens per second of a reply in each round: before ``load`` is entered, within it, and after it.

    After ``settle`` seconds the reply is taken to be as fast as it is alone; ``load`` waits itself until it counts.
    """
    found = []
    reply = Reply()
    reading = asyncio.ensure_future(reply.read(address))
    await asyncio.sleep(settle)
    before = await reply.rate(seconds)
    for _ in range(rounds):
        async with load():
            loaded = await reply.rate(seconds)
        await asyncio.sleep(settle)
        after = await reply.rate(seconds)
        found.append((before, loaded, after))
        before = after
    if reading.done():
        raise SystemExit("the reply ended too soon: fewer rounds, or a larger context")
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    return found


async def measure(address: str, load: Load, seconds: float, rounds: int) -> list[tuple[float, float, float]]:
    """Tokens per second of each round: before the load, under it, and after it."""
    host, port = address.removeprefix("http://").split(":")

    @contextlib.asynccontextmanager
    async def loaded() -> AsyncIterator[None]:
        async with waiting_streams(host, int(port), load.streams):
            await asyncio.sleep(SETTLE_SECONDS)
            requests = asyncio.ensure_future(small_requests(host, int(port), load.requests, seconds))
            yield
            await requests

    return await compared(address, loaded, seconds, rounds, SETTLE_SECONDS)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=200, help="clients that wait for their turn")
    parser.add_argument("--requests", type=int, default=2000, help="small requests, in all rounds")
    arguments = parse(parser, argv, seconds=0.3, rounds=1, streams=10, requests=20)
    load = Load(arguments.streams, arguments.requests // arguments.rounds)
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as directory:
        model = cached_model(SHAPE, directory)
        os.sched_setaffinity(0, cores[:2])
        command = [*PYCTL_SERVE, "-m", str(model), "-c", "65536", "-t", "1", "-np", "1"]
        with ServerProcess(command, Path(directory) / "log") as server:
            os.sched_setaffinity(0, cores[2:] or cores)
            found = asyncio.run(measure(server.url, load, arguments.seconds, arguments.rounds))
    rows: list[tuple[object, ...]] = []
    ratios = []
    for number, (before, loaded, after) in enumerate(found, 1):
        ratios.append((before + after) / 2 / loaded)
        rows.append((number, f"{before:.1f}", f"{loaded:.1f}", f"{after:.1f}", f"{ratios[-1]:.3f}"))
    rows.append(("median", "", "", "", f"{statistics.median(ratios):.3f}"))
    columns = ("round", "alone before, tokens/s", "under load", "alone after", "length of a step under load")
    title = f"A decode step beside {arguments.streams} waiting streams and {arguments.requests:,} small requests"
    show(title, columns, rows, keep="frontend" if arguments.keep else "")


if __name__ == "__main__":
    main()
