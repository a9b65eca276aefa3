"""How long a request waits for a batch of a warm-up on a GPU, and whether an interrupted warm-up stays exact.

    DIR/python -m bench.gpu.break_off MODEL.gguf --tokens 8192 32768

The benchmark evaluates a prompt as a request, as a warm-up without interruption, and as a warm-up that is interrupted
repeatedly, at any time within its batches. The table says NO if the logits of the three differ.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np

from bench.common import answered, show
from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.request import Request
from pyctl.engine.sampling import Sampling
from pyctl.llama import LlamaBackend, load, reserve_pinned
from pyctl.prompt import Prompt, as_tokens

MOST_BREAKS = 20

MESSAGE = 500


def prompt_of(n: int) -> Prompt:
    tokens = as_tokens(np.random.default_rng(n).integers(3, 200, n))
    boundaries = tuple(range(2000 if n > 4000 else n // 4, n, MESSAGE))
    return Prompt(tokens, boundaries, headers=boundaries[1::2])


def last_logits(engine: Engine, backend: LlamaBackend, prompt: Prompt) -> np.ndarray:
    answered(engine, Request(prompt, Sampling(temperature=0.0), max_tokens=1))
    return backend.logits(0)


def forget(engine: Engine, backend: LlamaBackend) -> None:
    for seq in engine.sequences:
        engine.prefix_cache.forget(seq)
    engine.prefix_cache.cache.clear()
    backend.memory.synchronize()


def measured(backend: LlamaBackend, n: int) -> list[object]:
    """One line of the table."""
    engine, prompt = Engine(backend, RamCache(0, None), EngineSettings(exact=True)), prompt_of(n)
    last_logits(engine, backend, prompt_of(n // 2))  # the first of all takes longer
    forget(engine, backend)
    began = time.perf_counter()
    expected = last_logits(engine, backend, prompt)
    cold = time.perf_counter() - began
    equal, seconds, waits, n_broken = [], [], list[float](), 0
    for breaks in (0, MOST_BREAKS):
        forget(engine, backend)
        handle = RequestHandle(Request(prompt, max_tokens=0, background=True))
        engine.submit(handle)
        (seq,) = engine.sequences
        rng, began = random.Random(n), time.perf_counter()
        while not handle.is_over:
            held = seq.n
            if n_broken < breaks:
                stepping = threading.Thread(target=engine.step)
                stepping.start()
                time.sleep(rng.uniform(0.0, 0.3 if cold > 1 else 0.003))
                asked = time.perf_counter()
                backend.control.preempt()
                stepping.join()
                if seq.n == held and not handle.is_over:
                    waits.append((time.perf_counter() - asked) * 1e3)
                    n_broken += 1
                backend.control.preempt(False)
            engine.step()
        backend.memory.synchronize()
        seconds.append(time.perf_counter() - began)
        equal.append(np.array_equal(last_logits(engine, backend, prompt), expected))
    forget(engine, backend)
    times = [
        f"{cold:.2f}",
        f"{seconds[0]:.2f}",
        f"{statistics.median(waits or [0]):.0f}",
        f"{max(waits, default=0):.0f}",
    ]
    return [n, *times, n_broken, "yes" if all(equal) else "NO"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--threads", type=int, default=-1)
    parser.add_argument("-ub", "--ubatch", type=int, default=1024)
    options = parser.parse_args(argv)
    n_ctx = max(options.tokens) + 1024
    settings = ModelSettings(
        path=options.model, n_ctx=n_ctx, n_seqs=1, n_ubatch=options.ubatch, n_threads=options.threads, flash_attn="on"
    )
    backend = load(settings).backend
    reserve_pinned(None)
    rows = [measured(backend, n) for n in options.tokens]
    backend.unload()
    columns = ["tokens", "request s", "warm-up s", "interrupt ms", "at most", "interrupts", "equal bits"]
    show("Interrupted warm-ups", columns, rows)


if __name__ == "__main__":
    main()
