"""How fast rows and state leave and enter a context, against a plain copy of as many bytes in the same run.

python bench/kv.py                 # a dense shape with 16 KiB of rows per token, and the tiny hybrid
python bench/kv.py -m model.gguf --tokens 8192 32768
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import median_seconds, show

from pyctl.config import ModelSettings
from pyctl.engine.llama import LlamaBackend, load
from pyctl.models import TINY_DENSE, TINY_HYBRID, write_model
from pyctl.prompt import as_tokens

REPEAT = 5


def rates(backend: LlamaBackend, n: int) -> list[list[object]]:
    """GB/s out and in for the rows of ``n`` tokens in one block and in 32 segments, and for the state."""
    tokens = as_tokens(np.random.default_rng(0).integers(0, 200, n))
    backend.clear(0)
    for start in range(0, n, backend.n_ubatch):
        backend.evaluate(0, tokens[start : start + backend.n_ubatch], start)
    memory = backend._memory
    found = []
    step = n // 32
    for label, edges in (("rows", [0, n]), ("rows, 32 segments", list(range(0, n + 1, step)))):
        blocks = [backend.save_rows(0, a, b) for a, b in itertools.pairwise(edges)]
        spans = [(block, a, b) for block, a, b in zip(blocks, edges, edges[1:], strict=False)]
        state = backend.save_state(0, n) if backend.kind == "hybrid" else None

        def out(blocks: list[np.ndarray] = blocks, edges: list[int] = edges) -> None:
            for block, a, b in zip(blocks, edges, edges[1:], strict=False):
                memory.save_rows(0, a, b, block)

        def back(spans: list[tuple[np.ndarray, int, int]] = spans, state: np.ndarray | None = state) -> None:
            backend.rewind(0, 0)
            backend.load_rows(0, 0, spans)

        found.append(row(label, n, sum(block.nbytes for block in blocks), out, back))
        if state is not None:
            backend.load_state(0, n, state)
    if backend.kind == "hybrid":
        state = backend.save_state(0, n)
        found.append(
            row(
                "state", n, state.nbytes, lambda: memory.save_state(0, n, state), lambda: memory.load_state(0, n, state)
            )
        )
    return found


def row(label: str, n: int, size: int, out: object, back: object) -> list[object]:
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    copy = size / median_seconds(lambda: np.copyto(target, source), REPEAT) / 1e9
    speeds = [size / median_seconds(function, REPEAT) / 1e9 for function in (out, back)]
    cells = [f"{speed:.2f} ({speed / copy:.0%})" for speed in speeds]
    return [label, n, f"{size / 1e6:,.1f}", f"{copy:.2f}", *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--keep", action="store_true", help="write results/kv.md")
    arguments = parser.parse_args()
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as directory:
        wide = replace(TINY_DENSE, name="wide-dense", num_heads=8, num_kv_heads=8, head_size=128, rope_size=128)
        paths = {Path(arguments.model).stem: arguments.model} if arguments.model else {}
        if not paths:
            for shape in (wide, TINY_HYBRID):
                paths[shape.name] = f"{directory}/{shape.name}.gguf"
                write_model(paths[shape.name], shape)
        for name, path in paths.items():
            loaded = load(ModelSettings(path=str(path), n_ctx=max(arguments.tokens) + 64))
            for n in arguments.tokens:
                rows += [[name, *cells] for cells in rates(loaded.backend, n)]
            loaded.backend.close()
    columns = ["model", "what", "tokens", "MB", "plain copy GB/s", "out GB/s", "in GB/s"]
    show("Rows and state out of and into a context", columns, rows, keep="kv" if arguments.keep else "")


if __name__ == "__main__":
    main()
