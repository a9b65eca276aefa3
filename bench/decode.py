"""What the engine costs besides llama.cpp: its decode loop against a bare loop of llama_decode and the same samplers.

    python -m bench.decode            # the smallest model, where the engine's share is largest

    python -m bench.decode --against DIR    # and another checkout's engine, in alternation

Both loops run in turn in one process, so that a busy machine slows both.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api

from bench.common import finished, parse, parser_of, show, tell
from bench.compare import add_comparison, compare
from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_options import EngineOptions
from pyctl.engine.llama import load
from pyctl.engine.llama.params import context_params
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.request import Request
from pyctl.engine.sampling import Sampling
from pyctl.engine.worker import Worker
from pyctl.models import builtin_model
from pyctl.prompt import Prompt, as_tokens

SAMPLING = Sampling(temperature=0.0, ignore_eos=True)
PROMPT = as_tokens(np.random.default_rng(0).integers(0, 200, 300))


def bare(model: Any, settings: ModelSettings, n: int) -> float:
    """Tokens per second of the shortest loop that generates n tokens with the bindings and the same samplers."""
    ctx = api.llama_init_from_model(model, context_params(settings, settings.n_ctx))
    vocab = api.llama_model_get_vocab(model)
    n_vocab = api.llama_vocab_n_tokens(vocab)
    ends = [token for token in range(n_vocab) if api.llama_vocab_is_eog(vocab, token)]
    bias = (api.llama_logit_bias * len(ends))(*(api.llama_logit_bias(token, float("-inf")) for token in ends))
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_logit_bias(n_vocab, len(ends), bias))
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_greedy())
    prompt = (api.llama_token * PROMPT.size)(*PROMPT.tolist())
    try:
        _decode(ctx, api.llama_batch_get_one(prompt, PROMPT.size))
        token = (api.llama_token * 1)()
        began = time.perf_counter()
        for _ in range(n):
            token[0] = api.llama_sampler_sample(chain, ctx, -1)
            _decode(ctx, api.llama_batch_get_one(token, 1))
        return n / (time.perf_counter() - began)
    finally:
        api.llama_sampler_free(chain)
        api.llama_free(ctx)


def _decode(ctx: Any, batch: Any) -> None:
    if code := api.llama_decode(ctx, batch):
        raise RuntimeError(f"llama_decode failed with {code}")


def engine(worker: Worker, n: int) -> float:
    """Tokens per second as the engine reports them, text and events included."""
    request = Request(Prompt(PROMPT), SAMPLING, max_tokens=n, cache_prompt=False)
    timings = finished(worker.submit(request)).timings
    if timings.n_predicted != n:
        raise SystemExit(f"{timings.n_predicted} tokens were generated, not {n}")
    return timings.n_predicted / timings.predicted_ms * 1e3


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("-m", "--model", default=str(builtin_model()))
    parser.add_argument("-t", "--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("-n", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=7)
    add_comparison(parser)
    arguments = parse(parser, argv, threads=[1], n=20, repeat=1, rounds=1)
    if arguments.against is not None:
        given = ["-m", arguments.model, "-n", str(arguments.n), "--repeat", str(arguments.repeat)]
        compare("bench.decode", [*given, "-t", *map(str, arguments.threads)], arguments.against, arguments.rounds)
        return
    records = []
    for threads in arguments.threads:
        settings = ModelSettings(path=arguments.model, n_ctx=4096, n_threads=threads)
        loaded = load(settings)
        worker = Worker(Engine(loaded.backend, RamCache(0, 0), EngineOptions()), loaded.info)
        ratios, ours, theirs = [], [], []
        for _ in range(arguments.repeat):
            ours.append(engine(worker, arguments.n))
            theirs.append(worker.call(functools.partial(bare, loaded.backend.model, settings, arguments.n)).result())
            ratios.append(ours[-1] / theirs[-1])
        worker.close()
        median = statistics.median
        numbers = {"bare tokens/s": median(theirs), "engine tokens/s": median(ours), "ratio": median(ratios)}
        records.append({"threads": threads, **numbers})
    if arguments.json:
        tell(records)
        return
    rows = [
        [n, f"{theirs:,.0f}", f"{ours:,.0f}", f"{ratio:.3f}"] for n, theirs, ours, ratio in map(dict.values, records)
    ]
    columns = ["threads", "bare loop tokens/s", "engine tokens/s", "ratio (median of pairs)"]
    show("Decode loop against a bare llama.cpp loop", columns, rows, keep="decode" if arguments.keep else "")


if __name__ == "__main__":
    main()
