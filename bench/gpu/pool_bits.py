"""Whether logits, blocks and resumed prompts of `--kv-pool` are bit-identical to those of a full cache.

    python -m bench.gpu.pool_bits MODELS [--models 27b] [--tokens 33000] [--resident all half none] [--types q8_0]

A prompt of random tokens is evaluated in batches, some of odd sizes, followed by single tokens: first with the whole
cache on the GPU, then with K and V of fewer layers there. Then the prompt is resumed in its middle from the blocks that
the full cache saved. `GGML_CUDA_DISABLE_GRAPHS=1` turns CUDA graphs off.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.gpu.machine import describe
from bench.gpu.pool import model_file, tokens_of
from pyctl.cache.snapshot import Block, Rows, State
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.pool import PoolSettings
from pyctl.errors import PyctlError
from pyctl.llama import LlamaBackend, load
from tools.generator import SHAPES

HEAD = "| shape | KV | tokens | layers on the GPU | logits equal | resumed equal | blocks equal | s | GB read |"

N_SINGLE, ROW_STEP = 64, 256


class Saved(NamedTuple):
    """Rows [0, n) and the state there."""

    n: int
    rows: Block
    state: State | None


class Text:
    """The tokens, and where batches end."""

    def __init__(self, n: int, n_ubatch: int) -> None:
        self.tokens = tokens_of(5, n + N_SINGLE)
        ends = {*range(n_ubatch, n, n_ubatch), n - 300, n - 269, n - 10, *range(n, n + N_SINGLE + 1)}
        self.ends = sorted(end for end in ends if end > 0)
        self.cut = self.ends[(len(self.ends) - N_SINGLE) // 2]

    def run(self, backend: LlamaBackend, begin: int = 0) -> tuple[list[NDArray[np.float32]], Saved | None]:
        """The logits after each batch behind ``begin``, and what was saved in the middle."""
        found, saved = [], None
        for end in self.ends:
            if end > begin:
                if end > self.tokens.size - N_SINGLE:
                    backend.decode([SequenceTokens(0, (int(self.tokens[begin]),), begin)])
                else:
                    backend.evaluate(0, self.tokens[begin:end], begin)
                found.append(np.array(backend.logits(0)))
                begin = end
                if end == self.cut:
                    state = backend.memory.save_state(0, end) if backend.memory.kind == "hybrid" else None
                    saved = Saved(end, backend.memory.save_rows(0, 0, end).block, state)
                    backend.memory.synchronize()
        return found, saved


def pooled(n_rows: int, n_layers: int, n_resident: int) -> int:
    """The tokens of a pool which has so many layers on the device beside two stages, or as near as can be."""
    n = max(min(n_resident + 2, n_layers - 1), 1) if n_resident < n_layers else n_layers
    return -(-n * n_rows // n_layers)


def compare(options: argparse.Namespace, shape: str, kv: str) -> None:
    """A line for each number of resident layers."""
    n, n_layers = options.tokens, SHAPES[shape.removesuffix("-nextn")].num_attention_layers
    n_rows = -(-(n + N_SINGLE + 1) // ROW_STEP) * ROW_STEP
    settings = ModelSettings(
        path=str(model_file(options.directory, shape)), n_ctx=n_rows, n_ubatch=options.ubatch, flash_attn="on",
        type_k=kv, type_v=kv, fit=False,
    )  # fmt: skip
    text = Text(n, options.ubatch)
    full = load(settings).backend
    wanted, saved = text.run(full)
    assert saved is not None
    full.unload()
    del full
    for resident in options.resident:
        n_resident = {"all": n_layers, "half": n_layers // 2, "none": 0}[resident]
        rows = pooled(n_rows, n_layers, n_resident)
        loaded = load(settings, pool=PoolSettings(rows))
        backend, pool, began = loaded.backend, loaded.info.pool, time.monotonic()
        if pool is None:
            raise PyctlError("there is no pool")
        found, mine = text.run(backend)
        seconds = time.monotonic() - began
        assert mine is not None
        backend.memory.clear(0)
        backend.memory.restore(0, 0, [(Rows(saved.rows), 0, saved.n)])
        if saved.state is not None:
            backend.memory.restore(0, saved.n, (), saved.state)
        resumed, _ = text.run(backend, saved.n)
        read = backend.streamed
        cells = [
            *(shape, kv, f"{n:,}", f"{pool.n_resident} of {pool.n_layers}"),
            *(share(found, wanted), share(resumed, wanted[-len(resumed) :])),
            "yes" if np.array_equal(mine.rows, saved.rows) else "NO",
            *(f"{seconds:.1f}", f"{read.n_bytes / 1e9 if read is not None else 0.0:.1f}"),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
        backend.unload()
        del backend, loaded


def share(found: list[NDArray[np.float32]], wanted: list[NDArray[np.float32]]) -> str:
    n_same = sum(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
    return f"{n_same} of {len(wanted)}" if n_same == len(wanted) else f"ONLY {n_same} of {len(wanted)}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="MODELS")
    parser.add_argument("--models", nargs="+", default=["27b"], metavar="SHAPE")
    parser.add_argument("--types", nargs="+", default=["q8_0"], help="types of K and V")
    parser.add_argument("--tokens", type=int, default=33_000)
    parser.add_argument("--resident", nargs="+", choices=("all", "half", "none"), default=["all", "half", "none"])
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--budget", type=float, default=200, metavar="S", help="seconds after which no case begins")
    options = parser.parse_args(argv)
    end = time.monotonic() + options.budget
    print(*(f"- {name}: {value}" for name, value in describe().items()), sep="\n")
    print(f"\n{HEAD}\n|{'---|' * HEAD.count(' | ')}---|", flush=True)
    for shape in options.models:
        for kv in options.types:
            if time.monotonic() > end:
                print(f"| {shape} | {kv} | left out: no time |", flush=True)
                continue
            try:
                compare(options, shape, kv)
            except PyctlError as error:
                print(f"| {shape} | {kv} | {type(error).__name__}: {error} |", flush=True)


if __name__ == "__main__":
    main()
