"""Size and speed of each codec of the disk cache, per kind of part, on one thread.

python -m bench.codec              # made-up values with a scale per channel, and blocks of the tiny models
python -m bench.codec --keep       # also writes results/codec.md
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence

import numpy as np

from bench.common import median_seconds, parse, parser_of, show
from pyctl.cache.disk.codec import CHUNK, Codec, Coding, choose, chunks, decode, encode, phase_of_blocks
from pyctl.cache.snapshot import Block
from pyctl.engine.model_settings import ModelSettings
from pyctl.llama import load
from pyctl.prompt import as_tokens
from tools.generator import TINY_DENSE, TINY_HYBRID, write_model

REPEAT = 3
WIDTH = 1024


def values(n_rows: int) -> np.ndarray:
    """Gaussian rows with a log-normal scale per channel, as keys and values look after their projections."""
    random = np.random.default_rng(0)
    return random.standard_normal((n_rows, WIDTH)) * random.lognormal(0, 0.7, WIDTH)


def as_q8_0(rows: np.ndarray) -> np.ndarray:
    """ggml's q8_0: blocks of 32 values, each an f16 scale and 32 signed bytes."""
    blocks = rows.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
    quants = np.round(blocks / scales.astype(np.float64)).clip(-127, 127).astype(np.int8)
    return np.concatenate([scales.view(np.uint8), quants.view(np.uint8)], axis=1)


def made_up(n_rows: int) -> dict[str, Block]:
    rows = values(n_rows)
    prompt = np.random.default_rng(1).zipf(1.2, 25 * n_rows) % 250_000
    quants = as_q8_0(rows).reshape(-1).view(np.uint8)
    return {
        "f16 rows": rows.astype(np.float16).reshape(-1).view(np.uint8),
        "q8_0 rows": np.concatenate([np.zeros(64, np.uint8), quants]),
        "f32 state": rows.astype(np.float32).reshape(-1).view(np.uint8),
        "random bytes": np.random.default_rng(2).integers(0, 256, n_rows << 11, dtype=np.uint8),
        "tokens": prompt.astype("<i4").view(np.uint8),
    }


def from_models(n_tokens: int) -> dict[str, Block]:
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for shape, kind in ((TINY_DENSE, "f16"), (TINY_DENSE, "q8_0"), (TINY_HYBRID, "f16")):
            path = f"{directory}/{shape.name}.gguf"
            write_model(path, shape)
            backend = load(ModelSettings(path=path, n_ctx=4096, type_k=kind, type_v=kind, n_threads=1)).backend
            tokens = as_tokens(np.random.default_rng(0).integers(0, 200, n_tokens))
            for start in range(0, tokens.size, backend.facts.n_ubatch):
                backend.evaluate(0, tokens[start : start + backend.facts.n_ubatch], start)
            found[f"{shape.name}, {kind} rows"] = np.array(backend.memory.save_rows(0, 0, tokens.size).block)
            if backend.memory.kind == "hybrid":
                found[f"{shape.name}, state"] = np.array(backend.memory.save_state(0, tokens.size).recurrent)
            backend.unload()
    return found


def measure(name: str, part: Block, coding: Coding, chosen: Coding) -> list[object]:
    ranges = list(chunks(part.size, CHUNK))
    out = np.empty_like(part)
    stored = [encode(coding, part[first:last]) for first, last in ranges]

    def code() -> None:
        for first, last in ranges:
            encode(coding, part[first:last])

    def back() -> None:
        for data, (first, last) in zip(stored, ranges, strict=True):
            decode(coding, data, out[first:last])

    share = sum(len(data) for data in stored) / part.size
    speeds = ["-" if coding.codec == Codec.RAW and f is code else f"{rate(part, f):.2f}" for f in (code, back)]
    assert np.array_equal(out, part)
    mark = "chosen" if coding.codec == chosen.codec else ""
    return [name, f"{part.size / 1e6:,.1f}", coding.codec.name.lower(), f"{share:.1%}", *speeds, mark]


def rate(part: Block, function: Callable[[], object]) -> float:
    return part.size / median_seconds(function, REPEAT) / 1e9


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=4096, help="rows of 1,024 made-up values")
    parser.add_argument("--tokens", type=int, default=3072, help="tokens that the tiny models evaluate")
    arguments = parse(parser, argv, rows=64, tokens=256)
    rows = []
    for name, part in {**made_up(arguments.rows), **from_models(arguments.tokens)}.items():
        chosen = choose(part)
        for codec in Codec:
            phase = phase_of_blocks(part) if codec == Codec.BLOCKS34 else 0
            rows.append(measure(name, part, Coding(codec, phase), chosen))
    columns = ["part", "MB", "codec", "stored", "encode GB/s", "decode GB/s", ""]
    show("Codecs of the disk cache, one thread", columns, rows, keep="codec" if arguments.keep else "")


if __name__ == "__main__":
    main()
