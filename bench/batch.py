"""Prefill speed by batch size: the cost of small batches, and the gain of a larger n_ubatch.

    python -m bench.batch                         # the tiny hybrid model
    python -m bench.batch -m model.gguf --tokens 4096

The default of MIN_BATCH (a boundary closer than this to the last batch end does not end a batch) rests on this table;
`bench.batch_ends` says what follows for prompts of many messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench.common import add_model, median_seconds, parse, parser_of, show
from pyctl.engine.model_settings import ModelSettings
from pyctl.llama import load
from pyctl.models import builtin_model
from pyctl.prompt import as_tokens

SIZES = (1, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048)
REFERENCE = 512


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_model(parser, str(builtin_model()))
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per measurement, fewer for small batches")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parse(parser, argv, tokens=64, repeat=1, threads=1)
    settings = ModelSettings(path=arguments.model, n_ctx=arguments.tokens + 64, n_ubatch=max(SIZES), n_batch=max(SIZES))
    loaded = load(replace(settings, n_threads=arguments.threads))
    backend = loaded.backend
    tokens = as_tokens(np.random.default_rng(0).integers(0, 200, arguments.tokens))
    speeds = {}
    for size in SIZES:
        n = min(arguments.tokens, max(size, 32 * size))

        def prefill(size: int = size, n: int = n) -> None:
            backend.memory.clear(0)
            for start in range(0, n, size):
                backend.evaluate(0, tokens[start : min(start + size, n)], start)
            backend.logits(0)

        speeds[size] = n / median_seconds(prefill, arguments.repeat)
    backend.unload()
    rows = [
        [size, f"{speed:,.0f}", f"{size / speed * 1e3:.2f}", f"{speed / speeds[REFERENCE]:.2f}"]
        for size, speed in speeds.items()
    ]
    columns = ["batch", "tokens/s", "ms per batch", f"against {REFERENCE}"]
    show("Prefill speed by batch size", columns, rows, keep="batch" if arguments.keep else "")


if __name__ == "__main__":
    main()
