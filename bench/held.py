"""The time to return to a conversation with held rows, against one more message in the current
conversation.

    python -m bench.held                                  # the tiny hybrid model
    python -m bench.held -m model.gguf --tokens 8192 32768

Each way ends with the first logits of a message of 64 tokens. Both conversations have the same
tokens in different cells, so logits must be bit-identical for every way. A return saves the state
of the other conversation.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench.common import add_model, parse, parser_of, show, tell
from pyctl.cache.snapshot import Block, HeldRows, Rows, State
from pyctl.llama.library.pinned_memory import reserve_pinned
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import Tokens, as_tokens
from tools.generator import TINY_HYBRID, write_model

REPEAT = 7
N_MESSAGE = 64


@dataclass(frozen=True)
class Returns:
    """Milliseconds after ``n`` tokens: one more message, back to held rows, those in RAM; whether
    bits agree.
    """

    n: int
    append_ms: float
    held_ms: float
    ram_ms: float
    equal: bool


def returns(backend: LlamaBackend, n: int) -> Returns:
    """Return the times of two conversations of ``n`` tokens on the device; the first time of each
    way is left out.
    """
    tokens = as_tokens(np.random.default_rng(n).integers(3, 200, n + N_MESSAGE))
    backend.memory.clear(0)
    for start in range(0, n, backend.facts.n_ubatch):
        backend.evaluate(0, tokens[start : min(start + backend.facts.n_ubatch, n)], start)
    rows = backend.memory.save_rows(0, 0, n).block
    state = backend.memory.save_state(0, n) if backend.memory.kind == "hybrid" else None
    held: list[HeldRows] = [backend.memory.cells.hold_rows(0, 0, n)]
    backend.memory.synchronize()
    message = tokens[n:]

    def back(source: Block | HeldRows) -> None:
        if state is not None:
            backend.memory.save_state(0, n)
        backend.memory.clear(0)
        go_to(backend, n, state, source)

    answers = []
    times: dict[str, list[float]] = {}
    back(rows)
    held.append(backend.memory.cells.hold_rows(0, 0, n))
    ways: list[tuple[str, Callable[[int], None]]] = [
        ("append", lambda i: None),
        ("held", lambda i: back(held[i % 2])),
        ("ram", lambda i: back(rows)),
    ]
    for name, way in ways:
        for i in range(REPEAT):
            backend.memory.synchronize()
            began = time.perf_counter()
            way(i)
            answers.append(answer(backend, n, message))
            times.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
            backend.memory.rewind(0, n)
            if state is not None:
                backend.memory.restore(0, n, (), state)
    for each in held:
        backend.memory.cells.release(each)
    append, on_device, ram = (statistics.median(times[name][1:]) for name, _ in ways)
    return Returns(
        n, append, on_device, ram, all(np.array_equal(each, answers[0]) for each in answers)
    )


def go_to(backend: LlamaBackend, n: int, state: State | None, source: Block | HeldRows) -> None:
    backend.memory.restore(0, 0, [(Rows(source), 0, n)], state)


def answer(backend: LlamaBackend, n: int, message: Tokens) -> np.ndarray:
    """Return the logits after ``message`` at position ``n``, shape (n_vocab,)."""
    backend.evaluate(0, message, n)
    return backend.logits(0)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row per number of tokens: milliseconds to the first logits after an append, after a
    return to rows on the device, and after one from RAM, and whether the bits are equal.
    """
    parser = parser_of(__doc__)
    add_model(parser, None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--json", action="store_true", help="print the times as JSON")
    options = parse(parser, argv, tokens=[256], threads=1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(options.model) if options.model else Path(directory) / "model.gguf"
        if not options.model:
            write_model(path, TINY_HYBRID)
        settings = ModelSettings(
            path=str(path), n_ctx=3 * max(options.tokens) + 1024, n_seqs=2, flash_attn="on"
        )
        backend = load(replace(settings, n_threads=options.threads)).backend
        reserve_pinned(None)
        found = [returns(backend, n) for n in options.tokens]
        backend.unload()
    if options.json:
        tell([asdict(each) for each in found])
        return
    rows = [
        [
            each.n,
            *(f"{ms:.1f}" for ms in (each.append_ms, each.held_ms, each.ram_ms)),
            "yes" if each.equal else "NO",
        ]
        for each in found
    ]
    columns = ["tokens", "append ms", "back, on the device", "back, from RAM", "equal bits"]
    show(
        "The first logits of a message of 64 tokens",
        columns,
        rows,
        keep="held" if options.keep else "",
    )


if __name__ == "__main__":
    main()
