"""Measure the gain of an object store: the first token cold, from the directory, from the store,
and while the store hangs.

    python -m bench.store                          # the built-in model
    python -m bench.store --model FILE --links 0 10 1    # Gbit/s; 0 is loopback as it is

Real servers, each with its own directory: the first evaluates all prompts, the others restore them.
The store is a folder of a small S3 server in this process, with the speed of a link. Seconds are
medians of the prompts.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import httpx

from bench.common import parse, parser_of, show, words
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess

PIECE = 2**18
HANGS = -1.0


class Link:
    """Objects in ``folder``, and a link of ``rate`` Gbit/s through which they are read; 0: no
    limit, HANGS: never.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rate = 0.0
        self.end = threading.Event()
        self._lock = threading.Lock()

    def send(self, handler: BaseHTTPRequestHandler, data: bytes) -> None:
        """Write ``data`` at the speed of the link, which all connections share."""
        for first in range(0, len(data), PIECE):
            with self._lock:
                time.sleep(min(PIECE, len(data) - first) * 8e-9 / self.rate if self.rate > 0 else 0)
            handler.wfile.write(data[first : first + PIECE])

    def listing(self, prefix: str) -> bytes:
        """Return all objects below ``prefix``, in one page."""
        head = '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        facts = '<ETag>"1"</ETag>'
        facts += "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        facts += "<StorageClass>STANDARD</StorageClass>"
        found = [
            (path.relative_to(self.folder), path.stat().st_size)
            for path in (self.folder / prefix).glob("*")
        ]
        entries = (
            f"<Contents><Key>{key}</Key><Size>{size}</Size>{facts}</Contents>"
            for key, size in found
        )
        return (
            f"{head}<IsTruncated>false</IsTruncated>{''.join(entries)}</ListBucketResult>".encode()
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    link: Link

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        if "list-type" in split.query:
            return self._answer(self.link.listing(parse_qs(split.query)["prefix"][0]))
        if self.link.rate == HANGS:
            self.link.end.wait()
        self._answer((self.link.folder / unquote(split.path).removeprefix("/bench/")).read_bytes())

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self._answer(b"")

    do_POST = do_PUT

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        with suppress(OSError):  # the client has given up
            self.end_headers()
            self.link.send(self, body)

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Link, dict[str, str]]]:
    """Yield a link to ``folder``, and the environment of servers that use it."""
    link = Link(folder)
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Handler", (_Handler,), {"link": link})
    ) as server:
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        keys = {
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "bench",
        }
        yield link, {**keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}"}
        link.end.set()
        server.shutdown()


def asked(url: str, prompts: Sequence[str]) -> list[object]:
    """Return tokens of a prompt, median seconds to the first token, and the share of the tokens
    that was restored.
    """
    seconds = []
    n_cached = 0
    n_prompt = 0
    for prompt in prompts:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
        began = time.perf_counter()
        timings = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).json()["timings"]
        seconds.append(time.perf_counter() - began)
        n_cached = n_cached + timings["cache_n"]
        n_prompt = n_prompt + timings["cache_n"] + timings["prompt_n"]
    median = sorted(seconds)[len(seconds) // 2]
    share = n_cached / n_prompt
    return [f"{n_prompt / len(prompts):,.0f}", f"{median:.3f}", f"{share:.0%}"]


def measure(
    model: Sequence[str], prompts: Sequence[str], links: Sequence[float], root: Path
) -> Iterator[list[object]]:
    """Yield a row for each way to the first token; ``links`` are in Gbit/s."""

    def command(directory: str, store: str) -> list[str]:
        flags = [
            "--kv-cache-dir",
            f"{root}/{directory}",
            "--disk-prefix-cache",
            "full",
            "--kv-store",
            store,
        ]
        return [*PYCTL_SERVE, *model, "-c", "16384", *flags]

    def store_of(server: ServerProcess) -> dict[str, Any]:
        return dict(httpx.get(f"{server.url}/cache").json()["disk"]["store"])

    first = command("first", f"file://{root}/store")
    with ServerProcess(first, root / "log") as server:
        yield ["cold", *asked(server.url, prompts)]
        while store_of(server)["sent"]["n"] < len(prompts):
            time.sleep(0.1)
    with ServerProcess(first, root / "log") as server:
        yield ["from the directory, after a restart", *asked(server.url, prompts)]
    with serving(root / "store") as (link, environment):
        ways = [
            (f"the store, {rate:g} Gbit/s" if rate else "the store, loopback", rate)
            for rate in links
        ]
        for number, (way, link.rate) in enumerate([*ways, ("a store that hangs", HANGS)]):
            with ServerProcess(
                command(f"{number}", "s3://bench"), root / "log", environment=environment
            ) as server:
                asked(server.url, ["Hello. " * 1000])  # measures how fast this machine evaluates
                while not store_of(server)["in_use"]:
                    time.sleep(0.1)
                yield [f"from {way}", *asked(server.url, prompts)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("-m", "--model", metavar="FILE", help="default: the built-in model")
    parser.add_argument("--characters", type=int, default=12000)
    parser.add_argument("--links", type=float, nargs="+", default=[0, 10, 1], metavar="GBIT/S")
    options = parse(parser, argv, characters=4000, links=[0])
    prompts = [words(seed, options.characters) for seed in range(5)]
    with tempfile.TemporaryDirectory() as name:
        rows = list(
            measure(
                ["-m", options.model] if options.model else [], prompts, options.links, Path(name)
            )
        )
    columns = ["way", "tokens", "s to the first token", "restored"]
    title = "Two servers and a store"
    model = Path(options.model).stem if options.model else "built-in model"
    show(f"{title}, {model}", columns, rows, keep="store" * options.keep, weights=f"real, {model}")


if __name__ == "__main__":
    main()
