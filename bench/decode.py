"""What the engine costs besides llama.cpp: its decode loop against a bare loop of llama_decode and the same samplers.

    python -m bench.decode            # the smallest model, where the engine's share is largest

    python -m bench.decode --against DIR    # and another checkout's engine, in alternation

Both loops run in turn in one process, so that a busy machine slows both. The ratio of the time on a processor hardly
changes on one; it counts the thread that calls llama.cpp.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llama_cpp import llama_cpp as api

from bench.common import finished, parse, parser_of, show, shown, tell
from bench.compare import add_comparison, compare
from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.request import Request
from pyctl.engine.sampling import Sampling
from pyctl.engine.worker import Worker
from pyctl.llama import load
from pyctl.llama.params import context_params
from pyctl.models import builtin_model
from pyctl.prompt import Prompt, as_tokens

SAMPLING = Sampling(temperature=0.0, ignore_eos=True)
PROMPT = as_tokens(np.random.default_rng(0).integers(0, 200, 300))


class Rate(NamedTuple):
    """Tokens per second of time; and per second that the thread had a processor, the prompt included."""

    by_clock: float
    by_cpu: float


def bare(model: Any, settings: ModelSettings, n: int) -> Rate:
    """The shortest loop that generates n tokens with the bindings and the same samplers."""
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
        worked = time.thread_time()
        _decode(ctx, api.llama_batch_get_one(prompt, PROMPT.size))
        token = (api.llama_token * 1)()
        began = time.perf_counter()
        for _ in range(n):
            token[0] = api.llama_sampler_sample(chain, ctx, -1)
            _decode(ctx, api.llama_batch_get_one(token, 1))
        return Rate(n / (time.perf_counter() - began), n / (time.thread_time() - worked))
    finally:
        api.llama_sampler_free(chain)
        api.llama_free(ctx)


def _decode(ctx: Any, batch: Any) -> None:
    if code := api.llama_decode(ctx, batch):
        raise RuntimeError(f"llama_decode failed with {code}")


def engine(worker: Worker, n: int) -> Rate:
    """As the engine reports it, text and events included."""
    worked = worker.call(time.thread_time).result()
    request = Request(Prompt(PROMPT), SAMPLING, max_tokens=n, cache_prompt=False)
    timings = finished(worker.submit(request)).timings
    if timings.n_predicted != n:
        raise SystemExit(f"{timings.n_predicted} tokens were generated, not {n}")
    return Rate(n / timings.predicted_ms * 1e3, n / (worker.call(time.thread_time).result() - worked))


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
        worker = Worker(Engine(loaded.backend, RamCache(0, 0), EngineSettings()), loaded.info)
        theirs, ours = [], []
        for _ in range(arguments.repeat):
            ours.append(engine(worker, arguments.n))
            theirs.append(worker.call(functools.partial(bare, loaded.backend.model, settings, arguments.n)).result())
        worker.close()
        median, pairs = statistics.median, list(zip(ours, theirs, strict=True))
        numbers = {
            "bare tokens/s": median(rate.by_clock for rate in theirs),
            "engine tokens/s": median(rate.by_clock for rate in ours),
            "ratio": median(mine.by_clock / bare.by_clock for mine, bare in pairs),
            "CPU ratio": median(mine.by_cpu / bare.by_cpu for mine, bare in pairs),
            "engine tokens per CPU s": median(rate.by_cpu for rate in ours),
        }
        records.append({"threads": threads, **numbers})
    if arguments.json:
        tell(records)
        return
    rows = [[value if isinstance(value, int) else shown(value) for value in record.values()] for record in records]
    columns = [
        "threads",
        "bare loop tokens/s",
        "engine tokens/s",
        "ratio (medians of pairs)",
        "by CPU time",
        "per CPU s",
    ]
    show("Decode loop against a bare llama.cpp loop", columns, rows, keep="decode" if arguments.keep else "")


if __name__ == "__main__":
    main()
