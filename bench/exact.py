"""Whether rewound and restored runs give the logits of a cold one, on any model and device: the largest difference.

    python bench/exact.py                              # the built-in tiny model
    python bench/exact.py -m model.gguf --tokens 3000

Every number should be 0. The tests hold that on tiny models; this is for full-size ones on a GPU.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import show

from pyctl.cache.plan import batch_ends
from pyctl.config import ModelSettings
from pyctl.engine.llama import LlamaBackend, load
from pyctl.models import builtin_model
from pyctl.prompt import Prompt, Tokens

Logits = dict[int, np.ndarray]

SETTINGS = (("f16", "on"), ("q8_0", "on"), ("f16", "off"))
"""KV type and flash attention."""


def run(backend: LlamaBackend, tokens: Tokens, ends: list[int], start: int = 0) -> Logits:
    """Evaluate from ``start`` on; the logits at every batch end after it."""
    found = {}
    for end in ends:
        if end > start:
            backend.evaluate(0, tokens[start:end], start)
            found[end] = backend.logits(0)
            start = end
    return found


def difference(warm: Logits, cold: Logits) -> float:
    """The largest difference; nan if any logit is no number."""
    return float(np.max([np.abs(logits - cold[end]).max() for end, logits in warm.items()]))


def measure(backend: LlamaBackend, prompt: Prompt) -> list[float]:
    """Differences of a second cold run, of one that saved at each boundary, rewound, restored, and restored in part."""
    tokens, cuts = prompt.tokens, list(prompt.boundaries)
    ends = batch_ends(prompt, backend.n_ubatch)
    cold = run(backend, tokens, ends)
    backend.clear(0)
    found = [difference(run(backend, tokens, ends), cold)]
    backend.clear(0)
    chain, states, start = [], {}, 0
    for cut in cuts:
        run(backend, tokens, [end for end in ends if end <= cut], start)
        chain.append((backend.save_rows(0, start, cut), start, cut))
        states[cut] = backend.save_state(0, cut)
        start = cut
    found.append(difference(run(backend, tokens, ends, start), cold))
    # (position, live rows that are kept): rewound in place, restored from nothing, restored from within a batch on.
    for n, keep in ((cuts[2], cuts[2]), (cuts[3], 0), (cuts[1], cuts[0] + 7)):
        backend.rewind(0, keep)
        backend.load_rows(0, keep, [(rows, max(a, keep), b) for rows, a, b in chain if keep < b <= n])
        if backend.kind == "hybrid":
            backend.load_state(0, n, states[n])
        found.append(difference(run(backend, tokens, ends, n), cold))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=str(builtin_model()))
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("-ub", type=int, default=512)
    parser.add_argument("--keep", action="store_true", help="write results/exact.md")
    arguments = parser.parse_args()
    n = arguments.tokens
    tokens = np.random.default_rng(5).integers(0, 200, n)
    prompt = Prompt.of(tokens, [n // 30, n // 5, n // 2, n * 9 // 10])
    rows: list[list[object]] = []
    for kv, flash in SETTINGS:
        settings = ModelSettings(
            path=arguments.model, n_ctx=n + 64, n_ubatch=arguments.ub, type_k=kv, type_v=kv, flash_attn=flash
        )
        backend = load(settings).backend
        rows.append([kv, flash, *measure(backend, prompt)])
        backend.close()
    columns = ["KV", "flash", "cold again", "after saving", "rewound", "restored", "restored in part"]
    show("Largest difference of logits from a cold run", columns, rows, keep="exact" if arguments.keep else "")


if __name__ == "__main__":
    main()
