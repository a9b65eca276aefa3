"""K and V beyond the device: the time of a batch, a token, a prompt and a restore with and without
`--kv-pool`.

    python -m bench.gpu.pool MODELS [--models 27b] [--modes full pool:auto pool:65536 nkvo ngl:40
    unified]
    python -m bench.gpu.pool MODELS --card 24000 --parts depth restore  # a card of 24 GB
    python -m bench.gpu.pool MODELS --card 15800 --modes pool:auto+moe:18  # one of 16 GB

MODELS is the directory of the files; files of tiny shapes are made there. A mode is the place of K
and V. With ``+moe:N`` the experts of N layers lie in RAM. ``depth`` evaluates batches and single
tokens after so many rows. ``restore`` resumes prompts of those sizes (100,000 tokens or more, or
the largest) from RAM, from disk, and from files in the page cache. ``cold`` evaluates a whole
prompt. Rows at depth are copies of a few batches', since time depends on their number, not on their
values. Each mode runs in a separate process, so that a crash is a line of the table.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.common import answered
from bench.gpu.machine import describe, vram_mib
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Rows, State
from pyctl.disk.directory import CacheDirectory
from pyctl.disk.disk import Disk
from pyctl.disk.model_folder import ModelFolder
from pyctl.disk.reader import StoreReader
from pyctl.disk.writer import StoreWriter
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.request import Done, Request
from pyctl.engine.sampling import Sampling
from pyctl.errors import EngineError, ModelError, PyctlError
from pyctl.llama.library.bindings import api
from pyctl.llama.library.pinned_memory import reserve_pinned
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.placements import experts_on_cpu
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.measure.process_stats import evict
from pyctl.processes.module_command import module_command
from pyctl.prompt import ImageSpan, Prompt, Tokens, as_tokens
from tools.generator import SHAPES, cached_model

HEADER_BYTES = 64
FIRST = slice(16, 24)
LAST = slice(24, 32)
"""Bytes of a saved block's header, and the places of its positions (csrc/core/block.h)."""

CELL_BYTES = 12

N_SINGLE = 48
"""Tokens that are evaluated one by one."""

SLOWEST_S = 20.0
"""A batch that would take longer, by what one after fewer rows took, is left out; single tokens end
after so long.
"""

LONG = 100_000

HEAD = "| shape | mode | context | resident | behind | batch ms | tokens/s | token ms | tokens/s "
HEAD += "| GB/s read | waited ms | GPU MiB |"


class Bench:
    """The measurement of one model in one mode."""

    def __init__(self, options: argparse.Namespace, shape: str, mode: str) -> None:
        """Load the model with the options of ``mode``, such as "full", "pool:auto" or
        "ngl:20+nkvo". Raises ModelError for an unknown mode.
        """
        path = model_file(options.directory, shape)
        self.shape = shape
        self.mode = mode
        self.options = options
        self.depths: list[int] = sorted(options.depths)
        self.end = time.monotonic() + options.budget
        n_ctx = options.ctx or self.depths[-1] + 4 * options.ubatch
        settings = ModelSettings(
            path=str(path),
            n_ctx=n_ctx,
            n_ubatch=options.ubatch,
            flash_attn="on",
            type_k=options.type,
            type_v=options.type,
            fit=False,
        )
        pool = 0
        for name, _, value in (part.partition(":") for part in mode.split("+")):
            if name == "nkvo":
                settings = replace(settings, offload_kqv=False)
            elif name == "ngl":
                settings = replace(settings, n_gpu_layers=int(value))
            elif name == "moe":
                settings = replace(settings, placements=experts_on_cpu(int(value)))
            elif name == "pool":
                pool = -1 if value == "auto" else int(value)
            elif name not in ("full", "unified"):
                raise ModelError(f"{name} is no mode")
            if name in ("nkvo", "ngl", "moe"):
                settings = replace(settings, n_threads=len(os.sched_getaffinity(0)))
        reserve_pinned(48 * 2**30)
        self.before_mib = vram_mib() or 0.0
        self.loaded = load(settings, pool=PoolSettings(pool))
        self.backend: LlamaBackend = self.loaded.backend
        self._block, self._state = self._sample()

    def depth_rows(self) -> None:
        """Print a line for each depth."""
        backend = self.backend
        at = 0
        n = self.options.ubatch
        longest = 0.0  # expected milliseconds of a batch, if known
        for depth in self.depths:
            if depth + 2 * n > backend.facts.n_ctx or time.monotonic() > self.end:
                print(
                    f"| {self.shape} | {self.mode} | {backend.facts.n_ctx:,} "
                    f"| | {depth:,} | left out |",
                    flush=True,
                )
                continue
            self._append(at, depth)
            batches: list[float] = []
            longest *= depth / at if at else 0
            at = depth
            while len(batches) < 3 and max(longest, sum(batches)) < SLOWEST_S * 1e3:
                batches.append(self._timed(lambda d=depth: backend.evaluate(0, tokens_of(1, n), d)))
                self._back(depth)
            self._single(depth)
            before = self._read()
            n_single, token_ms = self._singles(depth + 1)
            n_bytes, wait_ms = (now - then for now, then in zip(self._read(), before, strict=True))
            self._back(depth)
            longest = min(batches) if batches else longest
            pool = self.loaded.info.pool
            cells = [
                *(self.shape, self.mode, f"{backend.facts.n_ctx:,}"),
                f"{pool.n_resident} of {pool.n_layers}" if pool is not None else "all",
                f"{depth:,}",
                f"{'' if batches else 'about '}{longest:,.0f}",
                f"{n / longest * 1e3:,.0f}",
                *(f"{token_ms:,.1f}", f"{1e3 / token_ms:,.1f}"),
                f"{n_bytes / n_single / token_ms / 1e6:.1f}",
                f"{wait_ms / n_single:,.1f}",
                f"{(vram_mib() or 0.0) - self.before_mib:,.0f}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
        backend.memory.clear(0)

    def _read(self) -> tuple[int, float]:
        """Return bytes that attention has read from RAM, and milliseconds that it waited for
        them.
        """
        store = self.backend.memory.store
        return (0, 0.0) if store is None else (store.streamed_bytes, store.wait_ms)

    def restores(self) -> None:
        """Print the engine's figures for prompts, with made-up rows, that are new, in RAM, on disk
        and in files in memory.
        """
        backend = self.backend
        step = self.options.ubatch
        evaluate = backend.evaluate
        n = 0

        def made_up(
            seq: int,
            tokens: Tokens,
            start: int,
            *,
            output: bool = True,
            picture: ImageSpan | None = None,
        ) -> None:
            if tokens.size == step and not output and start + 2 * step < n:
                self._append(start, start + step)
            else:
                evaluate(seq, tokens, start, output=output, picture=picture)

        setattr(backend, "evaluate", made_up)  # noqa: B010
        for n in [depth for depth in self.depths if depth >= LONG] or self.depths[-1:]:
            if time.monotonic() < self.end:
                self._restore(n)
        setattr(backend, "evaluate", evaluate)  # noqa: B010

    def _restore(self, n: int) -> None:
        """Print milliseconds of restoring ``n`` tokens from RAM, from files that are out of the
        page cache, and from files in it. The first pass writes the files that the other two read.
        """
        prompt = Prompt.from_ids(tokens_of(2, n))
        other = Prompt.from_ids(tokens_of(3, min(n // 2, 3000)))
        told = ""
        with tempfile.TemporaryDirectory(dir=self.options.work) as place:
            for way in ("RAM", "disk", "files in memory"):
                sizes = self.backend.memory.shape.sizes
                policy = DiskPolicy.parse("full")
                directory = CacheDirectory(Path(place))
                folder = ModelFolder(directory, self.loaded.info.fingerprint, sizes)
                engine = Engine(
                    self.backend,
                    RamCache(64, 64 * 2**30),
                    EngineSettings(min_step=32_768),
                    Disk(StoreReader(folder), StoreWriter(folder), policy),
                )
                if way == "RAM":
                    asked(engine, prompt)
                    asked(engine, other)
                    # Else only the rows that this overwrote come from RAM.
                    engine.prefix_cache.device.evict_all()
                done = asked(engine, prompt)
                stats = done.stats
                n_bytes = done.stats.n_cached * self._row_bytes()
                print(
                    f"- {self.shape} {self.mode} {self.options.type}, {n:,} tokens, "
                    f"{way} (from {stats.source}): "
                    f"{stats.n_cached:,} restored in {stats.restore_ms:,.0f} ms "
                    f"({n_bytes / 2**20:,.0f} MiB), "
                    f"{stats.n_evaluated} evaluated, "
                    f"first token after {done.timings.first_token_ms:,.0f} ms{told}",
                    flush=True,
                )
                began = time.perf_counter()
                assert isinstance(engine.prefix_cache.disk, Disk)
                engine.prefix_cache.disk.flush(120)  # which a server that ends does not wait for
                engine.close(EngineError("the end"))
                self.backend.memory.clear(0)
                if way == "RAM":
                    files = [
                        path
                        for path in Path(place).rglob("*")
                        if path.is_file() and path.suffix != ".tmp"
                    ]
                    size = sum(path.stat().st_size for path in files) / 2**20
                    seconds = time.perf_counter() - began
                    told = f"; {size:,.0f} MiB of files, written within {seconds:.1f} s"
                    evict(files)
                else:
                    told = ""

    def cold(self) -> None:
        """Evaluate all of a prompt; print a line for each depth."""
        step = self.options.ubatch
        begin = 0
        prompt = tokens_of(4, self.depths[-1])
        self.backend.memory.cells.release_all()
        self.backend.memory.clear(0)
        ms = 0.0
        for depth in self.depths:
            if time.monotonic() + ms / 1e3 * (depth - begin) / max(begin, 1) > self.end:
                print(
                    f"- {self.shape} {self.mode} {self.options.type}, "
                    f"{depth:,} tokens cold: no time",
                    flush=True,
                )
                break
            ms += self._timed(lambda d=depth, a=begin: self._evaluate(prompt, a, d, step))
            begin = depth
            print(
                f"- {self.shape} {self.mode} {self.options.type}, "
                f"{depth:,} tokens cold: {ms / 1e3:.2f} s, "
                f"{depth / ms * 1e3:,.0f} tokens/s, "
                f"{(vram_mib() or 0.0) - self.before_mib:,.0f} MiB of the GPU",
                flush=True,
            )
        self.backend.memory.clear(0)

    def _evaluate(self, prompt: Tokens, begin: int, end: int, step: int) -> None:
        for start in range(begin, end, step):
            self.backend.evaluate(0, prompt[start : min(start + step, end)], start, output=False)

    # -- rows without evaluating them ----------

    def _sample(self) -> tuple[NDArray[np.uint8], State]:
        n = self.options.ubatch
        for start in (0, n):
            self.backend.evaluate(0, tokens_of(start, n), start)
        block = self.backend.memory.save_rows(0, 0, 2 * n).block
        state = self.backend.memory.save_state(0, 2 * n)
        self.backend.memory.synchronize()
        self.backend.memory.clear(0)
        return block, state

    def _append(self, first: int, last: int) -> None:
        """Restore rows [first, last), and the state at the end."""
        step = 2 * self.options.ubatch
        has_cells = "ext=1" in self.backend.memory.layout
        for at in range(first, last, step):
            n = min(at + step, last)
            self._block[FIRST] = np.frombuffer(np.int64(at).tobytes(), np.uint8)
            self._block[LAST] = np.frombuffer(np.int64(at + step).tobytes(), np.uint8)
            if has_cells:
                cells = (
                    self._block[HEADER_BYTES : HEADER_BYTES + CELL_BYTES * step]
                    .view(np.int32)
                    .reshape(step, 3)
                )
                cells[:, :2] += at - cells[0, 0]
            self.backend.memory.restore(0, at, [(Rows(self._block), at, n)])
            self.backend.memory.synchronize()
        self._set_state(last)

    def _set_state(self, n: int) -> None:
        if self.backend.memory.kind == "hybrid":
            self._state.recurrent[LAST] = np.frombuffer(np.int64(n).tobytes(), np.uint8)
            self.backend.memory.restore(0, n, (), self._state)
            self.backend.memory.synchronize()

    def _back(self, n: int) -> None:
        self.backend.memory.rewind(0, n)
        self._set_state(n)

    def _row_bytes(self) -> int:
        return self.backend.memory.shape.sizes.rows(0, 2) - self.backend.memory.shape.sizes.rows(
            0, 1
        )

    def _single(self, n: int) -> None:
        self.backend.decode([SequenceTokens(0, (n % 190 + 5,), n)])
        self.backend.logits(0)

    def _singles(self, n: int) -> tuple[int, float]:
        """Return the number of tokens evaluated one by one from ``n`` on, and milliseconds for
        each.
        """
        done = 0
        spent = 0.0
        while done < N_SINGLE and spent < SLOWEST_S * 1e3:
            spent += self._timed(lambda: self._single(n + done))  # noqa: B023
            done += 1
        return done, spent / done

    def _timed(self, function: object) -> float:
        api.llama_synchronize(self.backend.ctx)
        self.backend.memory.synchronize()
        began = time.perf_counter()
        assert callable(function)
        function()
        api.llama_synchronize(self.backend.ctx)
        return (time.perf_counter() - began) * 1e3


def model_file(directory: Path, shape: str) -> Path:
    """Return the file of ``shape``, which may have a head for drafts; a tiny one is written if it
    is not there.
    """
    path = directory / f"{shape}.gguf"
    if shape.startswith("tiny"):
        return cached_model(SHAPES[shape], directory)
    return path if path.exists() else directory / f"{shape}-nextn.gguf"


def tokens_of(seed: int, n: int) -> Tokens:
    return as_tokens(np.random.default_rng(seed).integers(0, 200, n))


def asked(engine: Engine, prompt: Prompt) -> Done:
    return answered(engine, Request(prompt, Sampling(temperature=0.0), 2))


def one(options: argparse.Namespace) -> None:
    """Measure the mode of this process."""
    try:
        bench = Bench(options, options.models[0], options.modes[0])
        parts = {"depth": bench.depth_rows, "restore": bench.restores, "cold": bench.cold}
        for part in options.parts:
            if time.monotonic() < bench.end:
                parts[part]()
    except (PyctlError, MemoryError) as error:
        print(
            f"| {options.models[0]} | {options.modes[0]} | {type(error).__name__}: {error} |",
            flush=True,
        )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed options; --one is the child's, which measures one model in one mode."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="MODELS")
    parser.add_argument("--models", nargs="+", default=["27b"], metavar="SHAPE")
    parser.add_argument("--modes", nargs="+", default=["full", "pool:auto"])
    parser.add_argument(
        "--parts", nargs="+", choices=("depth", "restore", "cold"), default=["depth"]
    )
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[32_768, 131_072, 262_144], metavar="TOKENS"
    )
    parser.add_argument(
        "--ctx",
        type=int,
        default=0,
        metavar="TOKENS",
        help="default: a little more than the depths",
    )
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--type", default="q8_0", help="type of K and V")
    parser.add_argument("--card", type=int, metavar="MIB", help="free memory to leave on the GPU")
    parser.add_argument("--work", type=Path, help="directory for files of the disk cache")
    parser.add_argument("--budget", type=float, default=220, metavar="S", help="total seconds")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    """Print a row per model, mode and depth. Each mode runs in a child, so that it starts with an
    empty device; with --card another child holds the rest of the device's memory.
    """
    options = arguments()
    if options.one:
        return one(options)
    end = time.monotonic() + options.budget
    print(*(f"- {name}: {value}" for name, value in describe("random").items()), sep="\n")
    print(f"\n{HEAD}\n|{'---|' * HEAD.count(' | ')}---|", flush=True)
    holder = [*module_command("bench.cuda"), str(options.card)]
    held = (
        subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if options.card
        else nullcontext()
    )
    with held as process:
        if process is not None and process.stdout is not None:
            print(process.stdout.readline().decode().strip(), file=sys.stderr)
        for shape in options.models:
            for mode in options.modes:
                run_mode(options, shape, mode, end - time.monotonic())
        if process is not None and process.stdin is not None:
            process.stdin.close()


def run_mode(options: argparse.Namespace, shape: str, mode: str, left: float) -> None:
    """Run it in a separate process for ``left`` seconds at most, and pass its output on at once."""
    if left < 10:
        print(f"| {shape} | {mode} | left out: no time |", flush=True)
        return
    given = [
        *sys.argv[1:],
        "--one",
        "--models",
        shape,
        "--modes",
        mode,
        "--budget",
        f"{left - 5:.0f}",
    ]
    more = {"GGML_CUDA_ENABLE_UNIFIED_MEMORY": "1"} if "unified" in mode else {}
    try:
        code = subprocess.run(
            [*module_command("bench.gpu.pool"), *given],
            timeout=left,
            check=False,
            env={**os.environ, **more},
        ).returncode
        if code:
            print(f"| {shape} | {mode} | ended with {code} |", flush=True)
    except subprocess.TimeoutExpired:
        print(f"| {shape} | {mode} | left out: no time |", flush=True)


if __name__ == "__main__":
    main()
