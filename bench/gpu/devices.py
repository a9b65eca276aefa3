"""One or several GPUs: whether restored rows and states have the same bits, and the cost of copies.

For each way to split a model: a cold prompt, with and without snapshots of each batch to RAM; the prompt again from
RAM, and from held rows after another conversation; a cleared sequence whose state was NaN.

    python -m bench.gpu.devices MODELS [--models 27b 35b-a3b] [--modes layer row tensor none layer:3,1]

MODELS is the directory of the files; files of tiny shapes are made there. Each case runs in a process of its own, so
that a crash is a line of the table.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

from bench.gpu.machine import describe
from pyctl.cache.snapshot import Rows, State
from pyctl.engine.model_settings import ModelSettings
from pyctl.llama import LlamaBackend, load, reserve_pinned
from pyctl.module_command import module_command
from pyctl.prompt import Tokens, as_tokens
from tools.generator import SHAPES, cached_model

BATCH = 512

T = TypeVar("T")

HEAD = "| shape | split | kind | cold ms | with snapshots ms | equal | from RAM ms | equal "
HEAD += "| from the device ms | append ms | equal | emptied ms | clean |"

Logits = list[NDArray[np.float32]]


class Case:
    """One model with one way to split it."""

    def __init__(self, directory: Path, shape: str, mode: str) -> None:
        path = directory / f"{shape}.gguf"
        if shape.startswith("tiny"):
            path = cached_model(SHAPES[shape], directory)
        elif not path.exists():
            path = directory / f"{shape}-nextn.gguf"
        name, _, split = mode.partition(":")
        shares = tuple(float(part) for part in split.split(",")) if split else ()
        is_tiny = shape.startswith("tiny")
        self.n, self.rest = (1024, 512) if is_tiny else (6144, 1024)
        if not is_tiny:
            reserve_pinned(6 * 2**30)
        settings = ModelSettings(
            path=str(path), n_ctx=4 * (self.n + self.rest), n_ubatch=BATCH, n_seqs=2, flash_attn="on",
            split_mode=name, tensor_split=shares,
        )  # fmt: skip
        backend = load(settings).backend
        assert isinstance(backend, LlamaBackend)
        self.backend = backend
        self.shape, self.mode = shape, mode

    def row(self) -> str:
        backend, prompts = self.backend, [tokens_of(seed, self.n + self.rest) for seed in (1, 2)]
        k = self.n // BATCH
        self._run(prompts[0][: 2 * BATCH])
        backend.memory.clear(0)
        cold_ms, cold = self._timed(lambda: self._run(prompts[0]))
        backend.memory.clear(0)
        blocks: list[NDArray[np.uint8]] = []
        states: list[State] = []
        save_ms, again = self._timed(lambda: self._run(prompts[0], blocks=blocks, states=states))
        backend.memory.clear(0)
        ram_ms, warm = self._timed(lambda: self._back(blocks[:k], states[k - 1], prompts[0]))
        backend.memory.clear(0)
        held = self._held(prompts) if backend.memory.shape.can_hold else "- | - | -"
        empty_ms, is_clean = self._emptied(prompts[0], cold[0])
        cells = [
            *(
                self.shape,
                self.mode,
                f"{backend.memory.kind}{', async' if backend.facts.is_async else ''}",
                f"{cold_ms:,.0f}",
            ),
            *(f"{save_ms:,.0f}", said(equal(cold, again)), f"{ram_ms:,.0f}", said(equal(warm, cold[k:])), held),
            *(f"{empty_ms:.2f}", said(is_clean)),
        ]
        return f"| {' | '.join(cells)} |"

    def _run(
        self,
        prompt: Tokens,
        start: int = 0,
        blocks: list[NDArray[np.uint8]] | None = None,
        states: list[State] | None = None,
    ) -> Logits:
        found = []
        for i in range(start, len(prompt), BATCH):
            self.backend.evaluate(0, prompt[i : i + BATCH], i)
            found.append(self.backend.logits(0))
            if blocks is not None and states is not None:
                blocks.append(self.backend.memory.save_rows(0, i, i + BATCH).block)
                states.append(self.backend.memory.save_state(0, i + BATCH))
        return found

    def _back(self, blocks: list[NDArray[np.uint8]], state: State, prompt: Tokens) -> Logits:
        if self.backend.memory.kind != "opaque":
            self.backend.memory.restore(
                0, 0, [(Rows(rows), i * BATCH, (i + 1) * BATCH) for i, rows in enumerate(blocks)]
            )
        if self.backend.memory.kind != "attention":
            self.backend.memory.restore(0, self.n, (), state)
        return self._run(prompt, self.n)

    def _held(self, prompts: list[Tokens]) -> str:
        """Going back to each of two prompts in turn, and going on with what is there."""
        backend, n, held, states, cold = self.backend, self.n, [], [], []
        for prompt in prompts:
            cold.append(self._run(prompt)[n // BATCH])
            backend.memory.clear(0)
            self._run(prompt[:n])
            held.append(backend.memory.hold(0, 0, n))
            states.append(backend.memory.save_state(0, n))
            backend.memory.clear(0)

        def on(turn: int) -> NDArray[np.float32]:
            backend.evaluate(0, prompts[turn][n : n + BATCH], n)
            return backend.logits(0)

        def back(turn: int) -> NDArray[np.float32]:
            backend.memory.restore(0, 0, [(Rows(held[turn]), 0, n)])
            if backend.memory.kind == "hybrid":
                backend.memory.restore(0, n, (), states[turn])
            return on(turn)

        times, appended, is_same = [], [], True
        for turn in (0, 1, 1, 0, 1, 0):
            ms, logits = self._timed(lambda turn=turn: back(turn))  # type: ignore[misc]
            backend.memory.rewind(0, n)
            if backend.memory.kind == "hybrid":
                backend.memory.restore(0, n, (), states[turn])
            append_ms, more = self._timed(lambda turn=turn: on(turn))  # type: ignore[misc]
            is_same = is_same and equal([logits, more], [cold[turn]] * 2)
            times.append(ms)
            appended.append(append_ms)
            backend.memory.clear(0)
        return f"{np.median(times[1:]):.1f} | {np.median(appended[1:]):.1f} | {said(is_same)}"

    def _emptied(self, prompt: Tokens, cold: NDArray[np.float32]) -> tuple[float, bool]:
        """Milliseconds of the host to empty a sequence that stands somewhere, and whether nothing of it is left."""
        times, is_clean = [], True
        for _ in range(3):
            self.backend.evaluate(0, prompt[:BATCH], 0)
            if self.backend.memory.kind == "hybrid":
                state = self.backend.memory.save_state(0, BATCH)
                self.backend.memory.synchronize()
                floats = state.recurrent[64 + (state.recurrent.size - 64) % 4 :].view("<f4")
                floats[:] = np.nan
                self.backend.memory.restore(0, BATCH, (), state)
            self._settle()
            began = time.perf_counter()
            self.backend.memory.clear(0)
            times.append((time.perf_counter() - began) * 1e3)
            self.backend.evaluate(0, prompt[:BATCH], 0)
            is_clean = is_clean and equal([self.backend.logits(0)], [cold])
            self.backend.memory.clear(0)
        return float(np.median(times)), is_clean

    def _settle(self) -> None:
        api.llama_synchronize(self.backend._ctx)
        self.backend.memory.synchronize()

    def _timed(self, function: Callable[[], T]) -> tuple[float, T]:
        self._settle()
        began = time.perf_counter()
        found = function()
        self._settle()
        return (time.perf_counter() - began) * 1e3, found


def tokens_of(seed: int, n: int) -> Tokens:
    return as_tokens(np.random.default_rng(seed).integers(0, 200, n))


def equal(one: Logits, other: Logits) -> bool:
    return len(one) == len(other) and all(np.array_equal(*pair) for pair in zip(one, other, strict=True))


def said(is_so: bool) -> str:
    return "yes" if is_so else "NO"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="MODELS")
    parser.add_argument("--models", nargs="+", default=["tiny-hybrid", "tiny-dense", "27b"], metavar="SHAPE")
    parser.add_argument("--modes", nargs="+", default=["layer", "none", "layer:3,1", "row", "tensor"])
    parser.add_argument("--budget", type=float, default=220, metavar="S", help="total seconds")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(Case(options.directory, options.models[0], options.modes[0]).row())
        return
    end = time.monotonic() + options.budget
    print(*(f"- {name}: {value}" for name, value in describe().items()), sep="\n")
    print(f"\n{HEAD}\n|{'---|' * HEAD.count(' | ')}---|", flush=True)
    for shape in options.models:
        for mode in options.modes:
            left = end - time.monotonic()
            command = [*module_command("bench.gpu.devices"), str(options.directory), "--one"]
            if left < 5:
                print(f"| {shape} | {mode} | left out: no time |")
                continue
            try:
                done = subprocess.run(
                    [*command, "--models", shape, "--modes", mode],
                    capture_output=True,
                    text=True,
                    timeout=left,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                print(f"| {shape} | {mode} | left out: no time |")
                continue
            told = done.stdout.strip().splitlines() or [f"| {shape} | {mode} | FAILED ({done.returncode}) |"]
            print(
                told[-1] if done.returncode == 0 else f"| {shape} | {mode} | FAILED ({done.returncode}) |", flush=True
            )
            if done.returncode != 0:
                print(*done.stderr.strip().splitlines()[-3:], sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
