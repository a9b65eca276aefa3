"""Every memory that llama.cpp has: whether what is resumed has the bits of a cold run, and what snapshots take.

    python -m bench.gpu.families --output bench/results/gpu-families.md

The models are small, with random weights; those whose name ends in a number have windows and heads of published sizes.
Each answers the same conversations with --exact and an empty cache before every prompt, and again in turn: extended,
edited, branched, shortened, after another one. "Differ" counts replies of which any of the five best log probabilities
of any token has another bit; the last columns are bytes of all snapshots by different tokens: rows stored once with
one state for each snapshot, and what they take.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.machine import describe
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Snapshot, needed_by
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.request import Failed, Piece, Request
from pyctl.engine.sampling import Sampling
from pyctl.llama import LlamaBackend, load
from pyctl.prompt import Prompt
from tools.generator.families import FAMILIES, Family, write_family

N_CTX, N_TOKENS = 4096, 6
START = 257
"""The token that begins a message."""

VARIANTS = (("f16", "on"), ("q8_0", "on"), ("f16", "off"))
HEAD = "| model | memory | places | device | KV | flash attention | replies | resumed | differ | least | taken |"

Turn = tuple[int, int]
TURNS: tuple[Turn, ...] = ((1, 90), (2, 150), (3, 40), (4, 700), (5, 60), (6, 900), (7, 33), (8, 300))


def chat(*turns: Turn) -> Prompt:
    """Messages (seed, length) and the header of a reply."""
    parts = [[START, *np.random.default_rng(seed).integers(0, 250, n - 1)] for seed, n in turns]
    tokens = np.concatenate([*parts, [START, 97, 115]])
    return Prompt.of(tokens, np.flatnonzero(tokens == START))


PROMPTS = (
    chat(*TURNS[:2]),
    chat(*TURNS[:4]),
    chat((9, 400), (10, 120)),
    chat(*TURNS[:6]),
    chat(*TURNS),
    chat(*TURNS[:3], (11, 680), *TURNS[4:]),
    chat(*TURNS[:6], (12, 170)),
    chat(*TURNS[:4]),
    chat(*TURNS[:1]),
    chat((9, 400), (10, 120), (13, 300)),
    chat(*TURNS),
)


def families() -> Iterator[Family]:
    """Those of the tests, and three with windows and heads as published models have them."""
    yield from FAMILIES.values()
    for name, window, head in (("tiny-gemma3", 512, 128), ("tiny-gemma3", 1024, 256), ("tiny-gpt-oss", 128, 64)):
        keys = {
            **FAMILIES[name].keys,
            "embedding_length": 256,
            "attention.head_count": 4,
            "attention.sliding_window": window,
            "attention.key_length": head,
            "attention.value_length": head,
        }
        yield replace(FAMILIES[name], name=f"{name}-{window}", keys=keys)


def reply(engine: Engine, prompt: Prompt, *, cache_prompt: bool = True) -> tuple[list[object], int]:
    """The five best log probabilities of each token, and how much of the prompt was cached."""
    sampling = Sampling(temperature=0.0)
    request = Request(prompt, sampling=sampling, max_tokens=N_TOKENS, n_probs=5, cache_prompt=cache_prompt)
    handle = RequestHandle(request)
    engine.submit(handle)
    while engine.step():
        pass
    events: list[Any] = list(handle.drain())
    failed = next((event.error for event in events if isinstance(event, Failed)), None)
    if failed is not None:
        raise failed
    return [event.probs for event in events if isinstance(event, Piece)], events[-1].stats.n_cached


def n_bytes(snapshots: Sequence[Snapshot]) -> tuple[int, int]:
    """Bytes of rows and of states, on the device or in RAM."""
    rows = sum(segment.n_bytes + segment.only_held_bytes for segment in needed_by(snapshots))
    return rows, sum(each.state.n_bytes for each in snapshots)


def n_different(prompts: Sequence[Prompt]) -> int:
    """How many tokens ``prompts`` have, if common beginnings count once."""
    ends = sorted(prompt.tokens.tolist() for prompt in prompts)
    shared = [next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
              for x, y in zip([[], *ends], ends, strict=False)]  # fmt: skip
    return sum(map(len, ends)) - sum(shared)


def run(backend: LlamaBackend) -> tuple[int, int, float, float]:
    """Replies that were resumed, those that differ, and bytes by different tokens: at least, and taken."""
    memory = backend.memory
    engine, expected = Engine(backend, RamCache(0, 0), EngineSettings(exact=True)), []
    for prompt in PROMPTS:
        for seq in engine.sequences:
            engine.prefix_cache.forget(seq)
        expected.append(reply(engine, prompt, cache_prompt=False)[0])
    memory.release_all()
    for seq in engine.sequences:
        engine.prefix_cache.forget(seq)
    engine = Engine(backend, RamCache(0, None), EngineSettings(exact=True))
    found = [reply(engine, prompt) for prompt in PROMPTS]
    n_differ = sum(got != wanted for (got, _), wanted in zip(found, expected, strict=True))
    n, (rows, states) = n_different(PROMPTS), n_bytes(engine.prefix_cache.cache.snapshots())
    least = memory.shape.sizes.row + states / n if memory.shape.has_rows else 0.0
    engine.prefix_cache.close()
    return sum(cached > 0 for _, cached in found), n_differ, least, (rows + states) / n


def row(family: Family, path: Path, kv: str, flash: str, n_seqs: int) -> str:
    """One line of the table."""
    settings = ModelSettings(
        path=str(path), n_ctx=N_CTX, n_ubatch=256, n_batch=256, n_threads=1, n_seqs=n_seqs,
        n_gpu_layers=-2, type_k=kv, type_v=kv, flash_attn=flash,
    )  # fmt: skip
    try:
        loaded = load(settings)
    except Exception as error:  # some models need flash attention, or heads that q8_0 fits
        return f"| {family.name} | | | | {kv} | {flash} | not loaded: {str(error).splitlines()[0][:60]} | | | | |"
    try:
        backend = loaded.backend
        places = backend.memory.shape.places
        resumed, n_differ, least, taken = run(backend)
        device = "GPU" if backend.facts.batch_cost > 0 else "CPU"
        where = f"{places.window} + n * {places.step}" if places.window else "all"
        cells = (family.name, backend.memory.kv.type, where, device, kv, flash, len(PROMPTS), resumed, n_differ)
        return f"| {' | '.join(map(str, cells))} | {least:,.0f} | {taken:,.0f} |"
    finally:
        loaded.backend.unload()


def table(wanted: Sequence[str], variants: Sequence[tuple[str, str]], n_seqs: int) -> list[str]:
    lines = [HEAD, "|---|---|---|---|---|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as directory:
        for family in families():
            if wanted and family.name not in wanted:
                continue
            path = Path(directory) / f"{family.name}.gguf"
            write_family(path, family)
            for kv, flash in variants:
                lines.append(row(family, path, kv, flash, n_seqs))
                print(lines[-1], flush=True)
            path.unlink()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the table here")
    parser.add_argument("--first", action="store_true", help="f16 and flash attention only")
    parser.add_argument("-np", dest="n_seqs", type=int, default=1, help="sequences of the context")
    parser.add_argument("families", nargs="*", help="these only")
    options = parser.parse_args()
    lines = table(options.families, VARIANTS[:1] if options.first else VARIANTS, options.n_seqs)
    if options.output is not None:
        machine = "; ".join(f"{name}: {value}" for name, value in describe().items())
        text = "\n".join(["# Families of models: bits of what is resumed, and bytes of snapshots", "", machine, ""])
        options.output.write_text(f"{text}\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
