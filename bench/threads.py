"""Prefill and decoding by the number of threads and by how long they spin, on a quiet and on a busy machine.

    python -m bench.threads                    # the built-in model, and wider ones
    python -m bench.threads --spin 0 1000 300000

Each figure is from a process of its own, since libgomp reads GOMP_SPINCOUNT when it is loaded. "Quiet" processes run in
the real-time class where the system allows it, so that other load does not slow them; "busy" ones share the cores with
processes that only count. Compare figures of one run only.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.common import parse, parser_of, show, shown
from pyctl.module_command import module_command
from tools.generator import TINY_DENSE, cached_model

BUSY = "while True: pass"
QUIET_REPEATS = 4
"""Quiet runs are short, and what they compare is closer together."""


def child(path: str, threads: int, n_prompt: int, n_predict: int) -> None:
    """Print seconds of a prefill and of decoding, and the threads that were chosen."""
    import numpy as np

    from pyctl.engine.backend import SequenceTokens
    from pyctl.engine.model_settings import ModelSettings
    from pyctl.llama import load

    with contextlib.redirect_stderr(None):
        backend = load(ModelSettings(path=path, n_ctx=n_prompt + n_predict, n_threads=threads)).backend
    tokens = np.random.default_rng(0).integers(0, 200, n_prompt).astype(np.int32)
    backend.evaluate(0, tokens[:64], 0)
    backend.memory.clear(0)
    began = time.perf_counter()
    for start in range(0, n_prompt, backend.facts.n_ubatch):
        backend.evaluate(0, tokens[start : start + backend.facts.n_ubatch], start)
        backend.logits(0)
    prefill, began = time.perf_counter() - began, time.perf_counter()
    for i in range(n_predict):
        backend.decode([SequenceTokens(0, (int(tokens[i % n_prompt]),), n_prompt + i)])
        backend.logits(0)
    print(json.dumps([prefill, time.perf_counter() - began]))
    sys.stdout.flush()
    os._exit(0)


@contextlib.contextmanager
def busy(n: int) -> Iterator[None]:
    """``n`` other processes that take what they get."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(n)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measured(path: str, threads: int, spin: str, n_prompt: int, n_predict: int, *, quiet: bool) -> list[float]:
    """Seconds of prefill and of decoding, in a process of its own."""
    command = [*module_command("bench.threads"), "--child", path, str(threads), str(n_prompt), str(n_predict)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    if spin != "pyctl":
        environ["GOMP_SPINCOUNT"] = "" if spin == "libgomp" else spin
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, preexec_fn=_real_time if quiet else None
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _real_time() -> None:
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))


def models(widths: Sequence[int], directory: str) -> dict[str, str]:
    """The built-in model, and dense ones of 4 layers, by name."""
    from pyctl.models import builtin_model

    found = {"built-in": str(builtin_model())}
    for width in widths:
        shape = replace(
            TINY_DENSE, name=f"dense-{width}", embedding=width, feed_forward=3 * width, num_heads=width // 64
        )
        found[f"{width} wide"] = str(cached_model(shape, directory))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--child", nargs=4, help="measure in this process: model, threads, prompt, reply")
    parser.add_argument("--widths", type=int, nargs="*", default=[1024])
    parser.add_argument("-t", "--threads", type=int, nargs="+", default=[2, -1], help="threads; -1: pyctl's choice")
    parser.add_argument("--spin", nargs="+", default=["libgomp", "pyctl"], help="counts, libgomp's or pyctl's default")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2], help="number of other processes")
    parser.add_argument("-n", type=int, nargs=2, default=[512, 50], help="tokens of prompt and reply")
    parser.add_argument("--repeat", type=int, default=2)
    options = parse(parser, argv, widths=[], threads=[1], spin=["pyctl"], busy=[1], n=[64, 4], repeat=1)
    if options.child:
        path, threads, n_prompt, n_predict = options.child
        return child(path, int(threads), int(n_prompt), int(n_predict))
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name, path in models(options.widths, directory).items():
            for n_busy in options.busy:
                cases = [(threads, spin) for threads in options.threads for spin in options.spin]
                times: dict[tuple[int, str], list[list[float]]] = {case: [] for case in cases}
                with busy(n_busy):
                    for _ in range(options.repeat if n_busy else QUIET_REPEATS * options.repeat):
                        for case in cases:
                            times[case].append(measured(path, *case, *options.n, quiet=n_busy == 0))
                for (threads, spin), seconds in times.items():
                    rates = [
                        n / statistics.median(each)
                        for n, each in zip(options.n, zip(*seconds, strict=True), strict=True)
                    ]
                    chosen = threads if threads > 0 else "chosen"
                    rows.append([name, n_busy, chosen, spin, *map(shown, rates)])
    show(
        "Threads on a quiet and on a busy machine",
        ["model", "other processes", "threads", "spin", "prefill tokens/s", "decode tokens/s"],
        rows,
        keep="threads" if options.keep else "",
    )


if __name__ == "__main__":
    main()
