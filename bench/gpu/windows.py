"""The lengths at which a sequence of a model with a sliding window is restored to the same bits.

    python -m bench.gpu.windows --output bench/results/gpu-windows.md

Each model is small, with random weights and with heads and windows of published sizes. For each length a text is
evaluated, saved, cleared, loaded and continued by 600 tokens; its outputs are compared with those of the saved run.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.gpu.machine import describe
from pyctl.engine.model_settings import ModelSettings
from pyctl.errors import StateError
from pyctl.llama import load
from pyctl.llama.memory_check import restores
from tools.generator.families import FAMILIES, Family, write_family

N_CTX, N_UBATCH, N_REST = 4096, 512, 600
VARIANTS = (("f16", "on", False), ("q8_0", "on", False), ("f16", "off", False), ("f16", "on", True))
HEAD = "| model | window | ring | device | KV | flash attention | lengths equal | lengths that differ |"


def sized(name: str, window: int, head: int) -> Family:
    """The family with heads and a window as published models have them."""
    family = FAMILIES[name]
    keys = {
        **family.keys,
        "embedding_length": 256,
        "attention.head_count": 4,
        "attention.sliding_window": window,
        "attention.key_length": head,
        "attention.value_length": head,
    }
    return replace(family, keys=keys)


def lengths(window: int, ring: int) -> list[int]:
    """Within the window, just behind it, whole tiles and whole rings behind it."""
    behind = (2, 32, 64, 128, 256, 512, 1024, ring, 2 * ring)
    return sorted({window // 2, window - 1, window, *(window + n for n in behind)})


def row(family: Family, path: Path, kv: str, flash: str, *, full: bool) -> str:
    """One line of the table."""
    settings = ModelSettings(
        path=str(path), n_ctx=N_CTX, n_ubatch=N_UBATCH, n_batch=N_UBATCH, n_threads=4, n_seqs=1,
        n_gpu_layers=-2, type_k=kv, type_v=kv, flash_attn=flash, swa_full=full,
    )  # fmt: skip
    window = int(family.keys["attention.sliding_window"])  # type: ignore[arg-type]
    loaded = load(settings)
    try:
        backend = loaded.backend
        _, ring, _ = backend.memory.kv.window
        same: list[str] = []
        others: list[str] = []
        for n in lengths(window, ring):
            if n + N_REST <= N_CTX:
                (same if restores(backend, n, backend.tokenizer.n_vocab, N_REST) else others).append(str(n))
        device = "GPU" if backend.facts.batch_cost > 0 else "CPU"
        cells = (family.arch, window, "none: --swa-full" if full else ring, device, kv, flash)
        return f"| {' | '.join(map(str, cells))} | {' '.join(same)} | {' '.join(others)} |"
    except StateError as error:
        return f"| {family.arch} | {window} | | | {kv} | {flash} | {error} | |"
    finally:
        loaded.backend.unload()


def table() -> list[str]:
    lines = [HEAD, "|---|---|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as directory:
        for name, window, head in (("tiny-gemma3", 512, 128), ("tiny-gemma3", 1024, 256), ("tiny-gpt-oss", 128, 64)):
            family = sized(name, window, head)
            path = Path(directory) / f"{name}-{window}.gguf"
            write_family(path, family)
            for kv, flash, full in VARIANTS:
                lines.append(row(family, path, kv, flash, full=full))
                print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file for the table")
    options = parser.parse_args()
    lines = table()
    if options.output is not None:
        machine = "; ".join(f"{name}: {value}" for name, value in describe().items())
        text = "\n".join(["# Sliding windows: where a saved sequence comes back to the same bits", "", machine, ""])
        options.output.write_text(f"{text}\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
