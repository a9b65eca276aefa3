"""Time to first token by prompt length: cold, live, rewound, restored from RAM.

    python -m bench.ttft                                   # the tiny hybrid model
    python -m bench.ttft -m model.gguf --tokens 8192 32768 -ub 512

live: the conversation goes on. rewound: its last message is replaced (rows stay, the state comes back). ram: another
conversation came between. Each continues by one message of 64 tokens; cold evaluates the same prompt from nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from bench.common import add_model, answered, parse, parser_of, show
from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.request import Done, Request
from pyctl.engine.sampling import Sampling
from pyctl.llama import load, reserve_pinned
from pyctl.models import builtin_model
from pyctl.prompt import Prompt

MESSAGE = 64
HEADER = 4


def prompt_of(seeds: Sequence[int], head: int) -> Prompt:
    """A head of ``head`` tokens, one message per further seed, and a generation header."""
    parts = [np.random.default_rng(seed).integers(0, 200, head if i == 0 else MESSAGE) for i, seed in enumerate(seeds)]
    parts.append(np.full(HEADER, 7))
    return Prompt.of(np.concatenate(parts), np.cumsum([part.size for part in parts])[:-1])


def ask(engine: Engine, prompt: Prompt, *, cached: bool = True, n_predict: int = 1) -> Done:
    return answered(engine, Request(prompt, Sampling(temperature=0.0), max_tokens=n_predict, cache_prompt=cached))


def measure(engine: Engine, n: int, repeat: int) -> list[list[object]]:
    """Median milliseconds to the first token per way of arriving at the same kind of prompt."""
    times: dict[str, list[Done]] = {"cold": [], "live": [], "rewound": [], "ram": []}
    for i in range(repeat):
        a, b = 10_000 * (i + 1), 10_000 * (i + 1) + 5_000
        ask(engine, prompt_of([a], n))
        times["live"].append(ask(engine, prompt_of([a, a + 1], n)))
        times["rewound"].append(ask(engine, prompt_of([a, a + 2], n)))
        ask(engine, prompt_of([b], n))
        times["ram"].append(ask(engine, prompt_of([a, a + 3], n)))
        times["cold"].append(ask(engine, prompt_of([a, a + 4], n), cached=False))
        engine.prefix_cache.cache.clear()
    medians = {way: statistics.median(d.timings.first_token_ms for d in done) for way, done in times.items()}
    rows: list[list[object]] = []
    for way, done in times.items():
        report = done[-1].stats
        restore = statistics.median(d.stats.restore_ms for d in done)
        save = statistics.median(d.stats.save_ms for d in done)
        speedup = f"{medians['cold'] / medians[way]:.1f}x"
        rows.append(
            [
                n,
                way,
                report.source,
                report.n_cached,
                report.n_evaluated,
                f"{restore:.2f}",
                f"{save:.2f}",
                f"{medians[way]:.1f}",
                speedup,
            ]
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_model(parser, str(builtin_model()))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("-ub", type=int, default=512)
    parser.add_argument("-ngl", type=int, default=-1)
    parser.add_argument("-ctk", default="f16")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parse(parser, argv, tokens=[256], repeat=1, threads=1)
    kv = arguments.ctk
    settings = ModelSettings(
        path=arguments.model,
        n_ctx=max(arguments.tokens) + 1024,
        n_ubatch=arguments.ub,
        n_gpu_layers=arguments.ngl,
        n_threads=arguments.threads,
        type_k=kv,
        type_v=kv,
    )
    loaded = load(settings)
    reserve_pinned(None)
    engine = Engine(loaded.backend, RamCache(64, None), EngineSettings())
    ask(engine, prompt_of([1], 600))
    rows = [row for n in arguments.tokens for row in measure(engine, n, arguments.repeat)]
    loaded.backend.unload()
    columns = [
        "tokens",
        "way",
        "source",
        "cached",
        "evaluated",
        "restore ms",
        "save ms",
        "first token ms",
        "against cold",
    ]
    show("Time to first token", columns, rows, keep="ttft" if arguments.keep else "")


if __name__ == "__main__":
    main()
