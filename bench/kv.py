"""Measure the speed of rows and state leaving and entering a context, against a plain copy of as
many bytes in the same run.

On a GPU that is one copy between pinned and device memory, elsewhere one from memory to memory.

python -m bench.kv           # a dense shape with 16 KiB of rows per token, and the tiny hybrid
python -m bench.kv -m model.gguf --tokens 8192 32768
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench.common import WIDE_DENSE, add_model, median_seconds, parse, parser_of, show, tell
from bench.cuda import open_device
from pyctl.cache.snapshot import Rows, Span
from pyctl.llama.library.pinned_memory import reserve_pinned
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import as_tokens
from tools.generator import TINY_HYBRID, write_model

REPEAT = 5


def rates(backend: LlamaBackend, n: int) -> list[Rate]:
    """Return GB/s out and in for the rows of ``n`` tokens in one block and in 32 segments, and for
    the state.
    """
    tokens = as_tokens(np.random.default_rng(0).integers(0, 200, n))
    backend.memory.clear(0)
    for start in range(0, n, backend.facts.n_ubatch):
        backend.evaluate(0, tokens[start : start + backend.facts.n_ubatch], start)
    memory = backend.memory.kv
    found: list[Rate] = []
    step = n // 32
    for label, edges in (("rows", [0, n]), ("rows, 32 segments", list(range(0, n + 1, step)))):
        blocks = [backend.memory.save_rows(0, a, b).block for a, b in itertools.pairwise(edges)]
        spans = [(Rows(block), a, b) for block, a, b in zip(blocks, edges, edges[1:], strict=False)]
        state = backend.memory.save_state(0, n) if backend.memory.kind == "hybrid" else None

        def out(blocks: list[np.ndarray] = blocks, edges: list[int] = edges) -> None:
            for block, a, b in zip(blocks, edges, edges[1:], strict=False):
                memory.save_rows(0, a, b, block)
            memory.finish()

        def back(spans: list[Span] = spans) -> None:
            backend.memory.rewind(0, 0)
            backend.memory.restore(0, 0, spans)
            memory.finish()

        found.append(rate(label, n, sum(block.nbytes for block in blocks), out, back))
        if state is not None:
            backend.memory.restore(0, n, (), state)
    if backend.memory.kind == "hybrid":
        block = backend.memory.save_state(0, n).recurrent

        def state_out() -> None:
            memory.save_state(0, n, block)
            memory.finish()

        def state_back() -> None:
            memory.load(0, n, [], block)
            memory.finish()

        found.append(rate("state", n, block.nbytes, state_out, state_back))
    return found


@dataclass(frozen=True)
class Rate:
    """GB/s of ``size`` bytes of ``what``, at ``n`` tokens; ``copy_out`` and ``copy_in`` are the
    plain copies.
    """

    what: str
    n: int
    size: int
    out: float
    back: float
    copy_out: float
    copy_in: float

    def cells(self) -> list[object]:
        """Return the figures as the cells of a table row."""
        moved = ((self.out, self.copy_out), (self.back, self.copy_in))
        shares = [f"{rate:.2f} ({rate / copy:.0%})" for rate, copy in moved]
        return [
            self.what,
            self.n,
            f"{self.size / 1e6:,.1f}",
            f"{self.copy_out:.2f}",
            f"{self.copy_in:.2f}",
            *shares,
        ]


def rate(
    what: str, n: int, size: int, out: Callable[[], object], back: Callable[[], object]
) -> Rate:
    moved = [size / median_seconds(function, REPEAT) / 1e9 for function in (out, back)]
    return Rate(what, n, size, moved[0], moved[1], *copies(size))


def copies(size: int) -> tuple[float, float]:
    """Return GB/s of a plain copy of ``size`` bytes out and in."""
    device = open_device()
    if device is not None:
        return device.copy_rates(size, REPEAT)
    source = np.ones(size, np.uint8)
    target = np.empty(size, np.uint8)
    found = size / median_seconds(lambda: np.copyto(target, source), REPEAT) / 1e9
    return found, found


def main(argv: Sequence[str] | None = None) -> None:
    """Print GB/s of plain copies and of bytes out of the context and into it, a row per model, kind
    of bytes and number of tokens. Without -m, models of two shapes are generated.
    """
    parser = parser_of(__doc__)
    add_model(parser, None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--json", action="store_true", help="print the rates as JSON")
    options = parse(parser, argv, tokens=[512], threads=1)
    found: list[tuple[str, Rate]] = []
    with tempfile.TemporaryDirectory() as directory:
        paths = {Path(options.model).stem: options.model} if options.model else {}
        if not paths:
            for shape in (WIDE_DENSE, TINY_HYBRID):
                paths[shape.name] = f"{directory}/{shape.name}.gguf"
                write_model(paths[shape.name], shape)
        for name, path in paths.items():
            settings = ModelSettings(
                path=str(path), n_ctx=max(options.tokens) + 64, flash_attn="on"
            )
            loaded = load(replace(settings, n_threads=options.threads))
            reserve_pinned(None)
            found += [(name, rate) for n in options.tokens for rate in rates(loaded.backend, n)]
            loaded.backend.unload()
    if options.json:
        tell([{"model": name, **asdict(rate)} for name, rate in found])
        return
    columns = [
        "model",
        "what",
        "tokens",
        "MB",
        "copy out GB/s",
        "copy in GB/s",
        "out GB/s",
        "in GB/s",
    ]
    rows = [[name, *rate.cells()] for name, rate in found]
    show(
        "Rows and state out of and into a context", columns, rows, keep="kv" if options.keep else ""
    )


if __name__ == "__main__":
    main()
