"""A store behind the disk: how fast it delivers a snapshot, and from which length on that beats evaluation.

    python -m bench.store                          # a dense shape with 16 KiB of rows per token
    python -m bench.store --links 0 10 2.5 1       # Gbit/s; 0 is loopback as it is

The object server is part of this process, implements reading by S3, and limits its speed to that of a link.
`store-links` has the measurements; `store` applies these bandwidths to the bytes of two models. It compares fetching a
snapshot to disk, reading it, and evaluating, by the same costs as for a request (pyctl.cache.restore.quickest).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

from bench.common import WIDE_DENSE, add_model, answered, parse, parser_of, show
from pyctl.cache.costs import Costs
from pyctl.cache.disk.behind import StoreBehind, connect
from pyctl.cache.disk.store import DiskStore
from pyctl.cache.disk_tier import DiskTier
from pyctl.cache.persist import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import PromptMatch
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.request import Request
from pyctl.engine.sampling import Sampling
from pyctl.llama import Loaded, allocate, load, reserve_pinned
from pyctl.prompt import Prompt
from tools.generator import QWEN36_27B, QWEN36_35B_A3B, Shape, write_model

MIB, MB, GB = 2**20, 1e6, 1e9

PIECE = 2**18

BUCKET = "bench"

DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


PREFILL: dict[Shape, dict[str, float]] = {
    QWEN36_27B: {"3090, slowest published": 673, "3090, fastest": 993, "H100": 2487},
    QWEN36_35B_A3B: {"H200, 200,000 tokens (gpu-long.md)": 4082},
}
"""Measured tokens/s of prompts by card."""

LENGTHS = (1024, 4096, 16_384, 65_536)


class Bucket:
    """Objects by path, and a link of ``rate`` bytes/s through which they are read; 0 is no limit."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.rate = 0.0
        self._free_at = 0.0
        self._lock = threading.Lock()

    def send(self, file: BufferedIOBase, data: memoryview) -> None:
        """Write ``data`` at the speed of the link, which all connections share."""
        for first in range(0, len(data), PIECE):
            piece = data[first : first + PIECE]
            if self.rate:
                with self._lock:
                    self._free_at = max(self._free_at, time.monotonic()) + len(piece) / self.rate
                    due = self._free_at
                time.sleep(max(due - time.monotonic(), 0))
            file.write(piece)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        query, objects = parse_qs(split.query), self.bucket.objects
        if "list-type" in query:
            self._answer(200, listing(objects, query.get("prefix", [""])[0]))
        elif (data := objects.get(self._key())) is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            first, _, last = self.headers.get("range", f"bytes=0-{len(data) - 1}").removeprefix("bytes=").partition("-")
            end = min(int(last) + 1, len(data))
            self._answer(206, memoryview(data)[int(first) : end], f"bytes {first}-{end - 1}/{len(data)}")

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")

    def _answer(self, status: int, body: bytes | memoryview, content_range: str = "") -> None:
        self.send_response(status)
        headers = {
            "ETag": '"1"',
            "Last-Modified": DATE,
            "Content-Length": str(len(body)),
            "Content-Range": content_range,
        }
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.bucket.send(self.wfile, memoryview(body))

    def log_message(self, format: str, *args: object) -> None:
        return


def listing(objects: dict[str, bytes], prefix: str) -> bytes:
    """All objects below ``prefix``, in one page."""
    head, when = '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">', "2026-01-01T00:00:00.000Z"
    entries = "".join(
        f'<Contents><Key>{key}</Key><LastModified>{when}</LastModified><ETag>"1"</ETag><Size>{len(data)}</Size>'
        "<StorageClass>STANDARD</StorageClass></Contents>"
        for key, data in list(objects.items())
        if key.startswith(prefix)
    )
    return f"{head}<Name>{BUCKET}</Name><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()


@contextmanager
def serving() -> Iterator[Bucket]:
    """A bucket at an address that the environment names."""
    bucket = Bucket()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"bucket": bucket})) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        keys = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "bench"}
        os.environ.update(keys, AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_address[1]}")
        try:
            yield bucket
        finally:
            server.shutdown()


@contextmanager
def opened(loaded: Loaded, directory: Path) -> Iterator[tuple[DiskStore, StoreBehind]]:
    """A cache directory with the store behind it."""
    files = DiskStore(directory, loaded.info.fingerprint, None, space=allocate)
    behind = StoreBehind(connect(f"s3://{BUCKET}"), "bench", files.files, files.sizes)
    try:
        yield files, behind
    finally:
        behind.close(10)
        files.close()


def prompt_of(seed: int, n: int) -> Prompt:
    """A message of ``n`` tokens, and a generation header."""
    return Prompt.of([*np.random.default_rng(seed).integers(0, 200, n), 7, 7, 7, 7], [n])


def fill(loaded: Loaded, prompt: Prompt, bucket: Bucket) -> float:
    """Evaluate ``prompt`` and have its snapshots in the store; seconds to the first token."""
    with tempfile.TemporaryDirectory() as name:
        store = DiskStore(Path(name), loaded.info.fingerprint, None, space=allocate)
        tier = DiskTier(store, DiskPolicy("full"), cold_max=10240)
        loaded.backend.memory.clear(0)
        engine = Engine(loaded.backend, RamCache(64, None), EngineSettings(), tier)
        try:
            done = answered(engine, Request(prompt, Sampling(temperature=0.0), max_tokens=1))
        finally:
            engine.prefix_cache.close()
        home = Path(name) / loaded.info.fingerprint
        found = [path for path in home.iterdir() if path.suffix in (".rows", ".state")]
        bucket.objects |= {f"{home.name}/{path.name}": path.read_bytes() for path in found}
    return done.timings.first_token_ms / 1e3


def fetch(loaded: Loaded, prompt: Prompt) -> tuple[int, float, float]:
    """Bring the deepest snapshot to an empty directory, and read it: bytes, and seconds of each."""
    with tempfile.TemporaryDirectory() as name, opened(loaded, Path(name)) as (files, behind):
        match = PromptMatch(prompt.tokens)
        behind.look_soon()
        wait_until(lambda: behind.find(match, prompt.end))
        prefix = behind.find(match, prompt.end)[-1]
        began = time.perf_counter()
        coming = behind.fetch(prefix)
        assert coming is not None
        coming.wait(600)
        fetched = time.perf_counter()
        if files.read(prefix, prompt.tokens) is None:
            raise RuntimeError("the snapshot did not come")
        return behind.view().fetched.n_bytes, fetched - began, time.perf_counter() - fetched


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("the store took too long")
        time.sleep(0.01)


@dataclass
class Measured:
    """Bytes/s from the store by link, and from disk."""

    links: dict[float, float]
    disk: float


def measure(
    loaded: Loaded, sizes: Sequence[int], links: Sequence[float], repeat: int
) -> tuple[Measured, list[list[object]]]:
    """Each length over each link; the bandwidths are those of the longest."""
    rows: list[list[object]] = []
    measured = Measured({}, 0.0)
    for number, n in enumerate(sizes):
        prompt = prompt_of(number + 1, n)
        with serving() as bucket:
            cold = fill(loaded, prompt, bucket)
            for link in links:
                bucket.rate = link * GB / 8
                runs = [fetch(loaded, prompt) for _ in range(repeat)]
                n_bytes = runs[0][0]
                coming, reading = (statistics.median(run[i] for run in runs) for i in (1, 2))
                measured.links[link], measured.disk = n_bytes / coming, n_bytes / reading
                total = coming + reading
                quicker = "store" if total < cold else "evaluate"
                speed = f"{n_bytes / coming / MB:,.0f}"
                facts = [f"{n:,}", f"{n_bytes / MIB:,.1f}", name_of(link), f"{coming:.3f}", speed]
                rows.append([*facts, f"{reading:.3f}", f"{cold:.3f}", quicker])
    return measured, rows


def name_of(link: float) -> str:
    return f"{link:g} Gbit/s" if link else "loopback"


def costs_of(rate: float) -> Costs:
    """Costs of a place from which ``rate`` bytes/s were read so often that nothing else counts."""
    costs = Costs()
    costs.note_read(2**44, 2**44 / rate)
    return costs


def pays(measured: Measured) -> list[list[object]]:
    """By shape, link and card: the seconds of the store for each length, and from which length on it is quicker."""
    disk, rows = costs_of(measured.disk), list[list[object]]()
    for shape, speeds in PREFILL.items():
        for link, rate in measured.links.items():
            far = costs_of(rate)

            def seconds(n: int, shape: Shape = shape, far: Costs = far) -> float:
                n_bytes = shape.state_bytes + n * shape.row_bytes()
                return far.read(n_bytes) + disk.read(n_bytes)

            for card, speed in speeds.items():
                cells = [f"{seconds(n):.2f} / {n / speed:.2f}" for n in LENGTHS]
                first = next((n for n in range(128, 2**18 + 1, 128) if seconds(n) < n / speed), None)
                found = f"{first:,}" if first is not None else "never"
                rows.append(
                    [shape.name.upper(), name_of(link), f"{rate / MB:,.0f}", f"{card}, {speed:,.0f}/s", *cells, found]
                )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_model(parser, None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--links", type=float, nargs="+", default=[0, 10, 1], metavar="GBIT/S")
    parser.add_argument("--repeat", type=int, default=5)
    options = parse(parser, argv, tokens=[600], repeat=1, threads=1)
    with tempfile.TemporaryDirectory() as name:
        path = options.model or f"{name}/wide-dense.gguf"
        if not options.model:
            write_model(path, WIDE_DENSE)
        loaded = load(ModelSettings(path=path, n_ctx=max(options.tokens) + 4096, n_threads=options.threads))
        reserve_pinned(None)
        measured, rows = measure(loaded, options.tokens, options.links, options.repeat)
        loaded.backend.unload()
    columns = ["tokens", "MiB", "link", "to disk s", "MB/s", "to RAM s", "evaluated s", "quicker"]
    show("A snapshot from a store, and its tokens evaluated anew", columns, rows, keep="store-links" * options.keep)
    lengths = [f"{n:,} tokens" for n in LENGTHS]
    columns = ["shape", "link", "MB/s", "card, prefill", *lengths, "pays from"]
    title = "Where a store pays: seconds from it / evaluated anew, by measured bandwidth (disk: "
    show(f"{title}{measured.disk / MB:,.0f} MB/s)", columns, pays(measured), keep="store" * options.keep)


if __name__ == "__main__":
    main()
