"""The two servers under test, each a process with an address, their options, and a streamed
completion of a text.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import RESULTS
from bench.gpu.report import OURS, PEER
from pyctl.measure.client import AskedServer, Messages
from pyctl.measure.client import TimedReply as Reply
from pyctl.measure.server_process import PYCTL_SERVE
from tools.generator import SHAPES

__all__ = [
    "Completion",
    "Messages",
    "Reply",
    "Server",
    "llama_server",
    "models_of",
    "options_of",
    "prepared_in",
    "pyctl",
    "weights_of",
]

BUDGET_MIB = "1048576"
"""For the files of the disk tier: more than any run writes."""


@dataclass(frozen=True)
class Completion:
    """A streamed completion of a text; ``first_ms`` and ``arrivals``, (seconds, tokens), are
    measured by the client's clock.
    """

    first_ms: float
    arrivals: list[tuple[float, int]]
    n_predicted: int
    timings: dict[str, Any]

    @property
    def n_drafted(self) -> int:
        return int(self.timings.get("draft_n", 0))

    @property
    def n_accepted(self) -> int:
        return int(self.timings.get("draft_n_accepted", 0))


def window_rate(replies: Sequence[Completion]) -> float:
    """Return tokens per second of all replies together while all of them are being written, by the
    client's clock; 0 if one ends before another begins.
    """
    first = max(reply.arrivals[0][0] for reply in replies)
    last = min(reply.arrivals[-1][0] for reply in replies)
    if last <= first:
        return 0.0
    n = sum(count for reply in replies for at, count in reply.arrivals if first < at <= last)
    return n / (last - first)


class Server(AskedServer):
    """A server that also completes texts, and counts its drafts."""

    def drafts(self) -> int:
        """Return the number of drafts verified so far, in replies that have ended; needs
        --metrics.
        """
        name = "llamacpp:spec_decode_num_drafts_total "
        with self._response("GET", "/metrics", None) as response:
            lines = response.read().decode().splitlines()
        return next(
            (int(float(line.removeprefix(name))) for line in lines if line.startswith(name)), 0
        )

    def complete(self, prompt: str | Sequence[int], n_predict: int) -> Completion:
        """Have a text, or tokens, continued by exactly so many tokens; OSError if the server
        refuses.
        """
        body = {
            "prompt": prompt,
            "n_predict": n_predict,
            "temperature": 0,
            "seed": 1,
            "ignore_eos": True,
        }
        began = time.perf_counter()
        arrivals: list[tuple[float, int]] = []
        with self._response(
            "POST", "/completion", {**body, "stream": True, "return_tokens": True}
        ) as response:
            for line in response:
                now = time.perf_counter()
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise OSError(f"the stream ended with {event['error']}")
                    if event.get("tokens"):
                        arrivals.append((now, len(event["tokens"])))
        if not arrivals or "timings" not in event:
            raise OSError("the stream ended without a token or without timings")
        n = sum(count for _, count in arrivals)
        return Completion((arrivals[0][0] - began) * 1e3, arrivals, n, event["timings"])


def pyctl(
    flags: Sequence[str], cache_dir: Path | None, log: Path, program: Sequence[str] = PYCTL_SERVE
) -> Server:
    """Return `pyctl serve`, with the ends of all prompts on disk if there is a directory."""
    disk = [
        "--kv-cache-dir",
        str(cache_dir),
        "--disk-prefix-cache",
        "full",
        "--kv-cache-budget",
        BUDGET_MIB,
    ]
    return Server("pyctl", [*program, *flags, *(disk if cache_dir else ())], log)


def llama_server(binary: str, flags: Sequence[str], log: Path) -> Server:
    """Return llama-server with its defaults: checkpoints and its cache in RAM are on."""
    return Server("llama-server", [binary, *flags], log)


def options_of(description: str | None, budget: float) -> argparse.ArgumentParser:
    """Return a parser with the options that all measurements of both servers have; ``budget`` is in
    seconds.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", nargs="+", choices=(OURS, PEER), default=(OURS, PEER))
    parser.add_argument(
        "--budget", type=float, default=budget, metavar="S", help="nothing is started after so long"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument(
        "--flags", type=str.split, default=[], help="more flags for both servers, in one argument"
    )
    return parser


def prepared_in(directory: Path) -> dict[str, Any]:
    """Return the settings that prepare.py wrote; SystemExit if this process runs outside of its
    environment.
    """
    found: dict[str, Any] = json.loads((directory / "prepared.json").read_text(encoding="utf-8"))
    if any(os.environ.get(name) != value for name, value in found["environment"].items()):
        raise SystemExit(f"run this with {directory}/python")
    return found


def weights_of(shape: str) -> str:
    """Return the weights of a model: random in generated shapes."""
    return "random" if shape in SHAPES else f"real, {shape}"


def models_of(options: argparse.Namespace) -> tuple[dict[str, Path], str | None]:
    """Return the file of each of --models, SHAPE[=FILE], and llama-server if it is known; the
    directory may be none.
    """
    directory = options.directory
    found = {}
    prepared = (
        prepared_in(directory) if directory is not None else {"models": {}, "llama_server": None}
    )
    for named in options.models:
        shape, _, file = named.partition("=")
        found[shape] = Path(
            file or prepared["models"].get(shape) or f"{directory}/models/{shape}.gguf"
        )
    return found, options.llama_server or prepared["llama_server"]
