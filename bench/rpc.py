"""One model on two workers of this machine, beside the same model in one process: logits, restores, speed.

    python -m bench.rpc                      # three tiny models
    python -m bench.rpc -m model.gguf --tokens 2000
    python -m bench.rpc -m model.gguf --rpc 10.0.0.2:50052,10.0.0.3:50052

All differences should be 0 if each worker has the CPU of this machine and as many threads. On other devices the second
column may differ from 0; the third one must not.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.common import add_model, parse, parser_of, shown
from bench.common import show as show_table
from pyctl.engine.model_settings import ModelSettings
from pyctl.llama import LlamaBackend, connect_workers, load
from pyctl.module_command import module_command
from pyctl.prompt import Tokens, as_tokens
from tools.generator import SHAPES, cached_model

Outputs = list[np.ndarray]

MODELS = ("tiny-hybrid", "tiny-moe", "tiny-dense")

N_SINGLE = 24
"""Tokens evaluated one at a time, as in a reply."""


@contextmanager
def worker(n_threads: int = 1, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A worker process on a free port of this machine, and its host:port; RuntimeError if it does not start."""
    command = [*module_command("pyctl"), "worker", "--port", "0", "--threads", str(n_threads), *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if match := re.match(r"worker at (\S+) lends ", line):
                    yield process, match[1]
                    return
            raise RuntimeError("the worker has not started")
        finally:
            process.kill()


def evaluate(backend: LlamaBackend, tokens: Tokens, start: int = 0) -> Outputs:
    """The logits after each batch of ``tokens`` from ``start`` on, the last N_SINGLE one at a time."""
    n, found = tokens.size - N_SINGLE, []
    for first, last in [
        *((at, min(at + backend.facts.n_ubatch, n)) for at in range(start, n, backend.facts.n_ubatch)),
        *((at, at + 1) for at in range(max(n, start), tokens.size)),
    ]:
        backend.evaluate(0, tokens[first:last], first)
        found.append(backend.logits(0))
    return found


def restored(backend: LlamaBackend, tokens: Tokens, n: int) -> Outputs:
    """As `evaluate` from ``n`` on, of a sequence whose first ``n`` tokens were saved, lost and restored."""
    memory = backend.memory
    memory.clear(0)
    evaluate(backend, tokens[: n + N_SINGLE])
    memory.clear(0)
    for first in range(0, n, backend.facts.n_ubatch):
        backend.evaluate(0, tokens[first : first + backend.facts.n_ubatch], first)
    rows = memory.save_rows(0, 0, n)
    state = memory.save_state(0, n)
    memory.synchronize()
    memory.clear(0)
    evaluate(backend, tokens[::-1])
    memory.clear(0)
    memory.restore(0, 0, [(rows, 0, n)], state)
    return evaluate(backend, tokens, n)


def difference(ones: Outputs, others: Outputs) -> float:
    """The largest difference; nan if any logit is no number."""
    return float(np.max([np.abs(one - other).max() for one, other in zip(ones, others, strict=True)]))


def measure(settings: ModelSettings, n_tokens: int) -> list[str]:
    """The row of one model."""
    tokens = as_tokens(np.random.default_rng(0).integers(0, 200, n_tokens))
    outputs, speeds, kept = [], [], 0.0
    for each in (replace(settings, devices=("none",)), settings):
        backend = load(each).backend
        evaluate(backend, tokens)
        backend.memory.clear(0)
        began = time.perf_counter()
        outputs.append(evaluate(backend, tokens))
        speeds.append(n_tokens / (time.perf_counter() - began))
        n = (n_tokens - N_SINGLE) // 2 // settings.n_ubatch * settings.n_ubatch
        kept = difference(outputs[-1][n // settings.n_ubatch :], restored(backend, tokens, n))
        backend.unload()
    name = Path(settings.path).stem.partition("-0-")[0]
    return [name, f"{difference(*outputs):g}", f"{kept:g}", *map(shown, speeds)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_model(parser, None)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rpc", default="", help="running workers, host:port,...")
    arguments = parse(parser, argv, tokens=400, threads=1)
    n_threads = max(arguments.threads, 1)
    rows = []
    with tempfile.TemporaryDirectory() as directory, worker(n_threads) as (_, one), worker(n_threads) as (_, other):
        endpoints = tuple(arguments.rpc.split(",")) if arguments.rpc else (one, other)
        connect_workers(endpoints)
        paths = [cached_model(SHAPES[name], Path(directory)) for name in MODELS]
        for path in [arguments.model] if arguments.model else paths:
            settings = ModelSettings(
                path=str(path), n_ctx=arguments.tokens + 64, n_ubatch=128, n_threads=n_threads, workers=endpoints
            )
            rows.append(measure(settings, arguments.tokens))
    columns = ["model", "against one process", "restored", "tokens/s, one process", "tokens/s, workers"]
    title = "Largest differences of logits, and speed, on two workers"
    show_table(title, columns, rows, keep="rpc" if arguments.keep else "")


if __name__ == "__main__":
    main()
