"""What the engine costs besides llama.cpp: its decode loop against a bare loop of llama_decode and the same samplers.

    python bench/decode.py            # the smallest model, where the engine's share is largest

Both loops run in turn in one process, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import numpy as np
from common import show
from llama_cpp import llama_cpp as api

from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine, EngineOptions
from pyctl.engine.llama import LlamaBackend, load
from pyctl.engine.llama.model_settings import ModelSettings
from pyctl.engine.llama.sampler import LlamaSampler
from pyctl.engine.request import Done, Failed, Request
from pyctl.engine.sampling import Sampling
from pyctl.engine.worker import Worker
from pyctl.models import builtin_model
from pyctl.prompt import Prompt, as_tokens

SAMPLING = Sampling(temperature=0.0, ignore_eos=True)
PROMPT = as_tokens(np.random.default_rng(0).integers(0, 200, 300))


def bare(backend: LlamaBackend, n: int) -> float:
    """Tokens per second of the shortest loop that generates n tokens with the bindings and the same samplers."""
    backend.clear(0)
    backend.evaluate(0, PROMPT, 0)
    sampler = LlamaSampler(backend._model, backend._ctx, SAMPLING, PROMPT, backend.tokenizer.end_tokens())
    chain = sampler._chain
    token = (api.llama_token * 1)()
    began = time.perf_counter()
    for _ in range(n):
        token[0] = api.llama_sampler_sample(chain, backend._ctx, -1)
        api.llama_decode(backend._ctx, api.llama_batch_get_one(token, 1))
    elapsed = time.perf_counter() - began
    sampler.close()
    backend.clear(0)
    return n / elapsed


def engine(worker: Worker, n: int) -> float:
    """Tokens per second as the engine reports them, text and events included."""
    request = Request(Prompt(PROMPT), SAMPLING, max_tokens=n, cache_prompt=False)
    for event in worker.submit(request):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Done):
            return event.timings.predicted_n / event.timings.predicted_ms * 1e3
    raise AssertionError("a reply ends with Done or Failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=str(builtin_model()))
    parser.add_argument("-t", "--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("-n", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--keep", action="store_true", help="write results/decode.md")
    arguments = parser.parse_args()
    rows: list[list[object]] = []
    for threads in arguments.threads:
        loaded = load(ModelSettings(path=arguments.model, n_ctx=4096, n_threads=threads))
        worker = Worker(Engine(loaded.backend, RamCache(0, 0), EngineOptions()), loaded.info)
        ratios, ours, theirs = [], [], []
        for _ in range(arguments.repeat):
            ours.append(engine(worker, arguments.n))
            theirs.append(worker.call(functools.partial(bare, loaded.backend, arguments.n)).result())
            ratios.append(ours[-1] / theirs[-1])
        worker.close()
        median = statistics.median
        rows.append([threads, f"{median(theirs):,.0f}", f"{median(ours):,.0f}", f"{median(ratios):.3f}"])
    columns = ["threads", "bare loop tokens/s", "engine tokens/s", "ratio (median of pairs)"]
    show("Decode loop against a bare llama.cpp loop", columns, rows, keep="decode" if arguments.keep else "")


if __name__ == "__main__":
    main()
