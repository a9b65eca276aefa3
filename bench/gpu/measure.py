"""Measure pyctl and llama-server side by side, on a machine that prepare.py has prepared.

    DIR/python -m bench.gpu.measure DIR                          # everything
    DIR/python -m bench.gpu.measure DIR --only base kv --budget 500 --results OUT
    DIR/python -m bench.gpu.measure DIR --models tiny-hybrid --sizes 3000 1000 --long 6000 --ctx 16384 --only base

Sections, the most telling first: base (first token, decode, prefill, memory and restarts at --sizes), kv (copies in
GB/s), long (as base, at --long), exact (logits), card (27B within 24 GB). Each finding is written to
gpu-side-by-side-<shape>.json and .md at once. What no longer fits --budget is skipped, and the tables say so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPException
from pathlib import Path

from bench.gpu.machine import describe, vram_mib
from bench.gpu.report import COLD, OURS, PEER, aims
from bench.gpu.results import Clock, Results
from bench.gpu.servers import pyctl
from bench.gpu.side_by_side import side_by_side
from bench.gpu.visit import N_FIRST, QUESTION, Run
from bench.gpu.workloads import Conversation

HERE = Path(__file__).resolve().parent
SECTIONS = ("base", "kv", "long", "exact", "card")
PREFILL = {"27b": 2400.0, "35b-a3b": 5000.0}
"""Tokens per second that the first estimate assumes; a tiny model on a CPU is in between."""

LOADING = {"27b": 10.0, "35b-a3b": 12.0}
"""Seconds until a server answers, likewise."""

CARD_MIB = 24_000
"""What a card of 24 GB has left beside the driver's own."""


def inside(run: Run, section: str, seconds: float, kind: str, command: str, sizes: Sequence[int]) -> None:
    """Run inside.py and keep each line it prints as a record."""
    if not run.clock.fits(seconds):
        return run.results.skip(section, section, "no time left")
    log = run.work / f"{run.shape}-{section}.log"
    arguments = [sys.executable, str(HERE / "inside.py"), command, str(run.model), *map(str, sizes)]
    with log.open("ab") as errors, subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"{"):
                run.results.add(section, kind, **json.loads(line))
                print(f"    {run.clock.elapsed:6.1f} s  {line.decode().strip()[:150]}", flush=True)
    if process.returncode != 0:
        run.results.skip(section, section, f"failed: {log.read_text(errors='replace')[-300:]}")


@contextmanager
def small_card(run: Run) -> Iterator[None]:
    """Leaves as much device memory as a card of 24 GB would have."""
    arguments = [sys.executable, str(HERE / "inside.py"), "ballast", str(CARD_MIB)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise OSError("the memory of the GPU could not be taken")
            yield
        finally:
            process.stdin.close()


def card(run: Run) -> None:
    """The long prompt and one more turn on what a 24 GB card has, q8_0 KV."""
    n = run.options.long
    if vram_mib() is None:
        return run.results.skip("card", "24 GB", "no GPU")
    if not run.clock.fits(run.loading + run.clock.prefill(n) + 5):
        return run.results.skip("card", "24 GB", "no time left")
    flags = run.flags("q8_0", max(run.options.ctx, 131_072))
    server = pyctl(["-m", str(run.model), *flags], None, run.work / f"{run.shape}-card.log")
    try:
        with small_card(run), closing(Conversation(run.shape, n).ask(COLD, n)) as steps:
            before = vram_mib() or 0.0
            server.start()
            step = next(steps)
            cold = server.ask(step.messages, N_FIRST)
            following = [*step.messages, {"role": "assistant", "content": cold.text}, QUESTION]
            warm = server.ask(following, N_FIRST)
            run.results.add(
                "card", "small card", flags=" ".join(flags), limit_mib=CARD_MIB, vram_mib=(vram_mib() or 0.0) - before,
                prompt=cold.cached + cold.evaluated, first_ms=cold.first_ms, next_ms=warm.first_ms,
                next_evaluated=warm.evaluated,
            )  # fmt: skip
            server.kill()
    except (OSError, HTTPException, ValueError) as error:
        run.results.skip("card", "24 GB", f"failed: {str(error)[:300]}")
    finally:
        server.kill()


def jobs(runs: Sequence[Run], only: Sequence[str]) -> list[tuple[str, Run, Callable[[Run], None]]]:
    """(section, model, what to do), the most telling first."""
    planned = [(section, run) for section in SECTIONS for run in runs if section != "card" or run is runs[0]]
    return [(section, run, WORK[section]) for section, run in planned if section in only]


def base(run: Run) -> None:
    side_by_side(run, "base", run.options.sizes, thorough=True)


def copies(run: Run) -> None:
    sizes = run.options.sizes
    inside(run, "kv", 40, "copy", "kv", [n // 512 * 512 for n in (min(sizes), max(sizes))])


def long(run: Run) -> None:
    side_by_side(run, "long", [run.options.long, min(2048, run.options.sizes[-1])], thorough=False)


def exact(run: Run) -> None:
    inside(run, "exact", 60, "exact", "exact", [run.options.exact_tokens])


WORK: dict[str, Callable[[Run], None]] = {"base": base, "kv": copies, "long": long, "exact": exact, "card": card}
"""By section, in the order of SECTIONS."""


def wait_for(model: Path, clock: Clock) -> bool:
    """Whether the model is there before time runs out; False at once if nobody writes it any more."""
    writer = model.with_suffix(".pid")
    while not model.exists():
        alive = writer.exists() and Path(f"/proc/{writer.read_text()}").exists()
        if not (alive or model.exists()) or not clock.fits(20):
            return False
        time.sleep(0.5)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="what prepare.py was given")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--models", nargs="+", metavar="SHAPE", help="default: those that were prepared")
    parser.add_argument("--servers", nargs="+", choices=(OURS, PEER), default=(OURS, PEER))
    parser.add_argument("--sizes", type=int, nargs="+", default=[32768, 8192], help="conversations of base, tokens")
    parser.add_argument("--long", type=int, default=100_000, help="conversation of long and card, tokens")
    parser.add_argument("--ctx", type=int, default=120_000, help="-c of both servers")
    parser.add_argument("--exact-tokens", type=int, default=3000)
    parser.add_argument("--budget", type=float, default=3600, metavar="S", help="seconds, all in all")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results", metavar="DIR")
    parser.add_argument("--flags", default="", help="more flags for both servers, in one argument")
    options = parser.parse_args()
    options.flags = options.flags.split()
    prepared = json.loads((options.directory / "prepared.json").read_text(encoding="utf-8"))
    if any(os.environ.get(name) != value for name, value in prepared["environment"].items()):
        raise SystemExit(f"run this with {options.directory}/python")
    work = options.directory / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()

    began, header = time.monotonic(), describe()
    runs = []
    for shape in options.models or prepared["models"]:
        clock = Clock(began + options.budget, PREFILL.get(shape, 4000.0))
        results = Results(options.results, shape, header)
        runs.append(
            Run(shape, Path(prepared["models"][shape]), prepared["llama_server"], options, results, clock, work)
        )
    for section, run, work_on in jobs(runs, options.only):
        print(f"{run.clock.elapsed:8.1f} s  {run.shape}: {section}", flush=True)
        run.results.begin(section)
        if wait_for(run.model, run.clock):
            work_on(run)
        else:
            run.results.skip(section, section, "the model is not there")
    for run in runs:
        print(f"\n{run.shape}")
        for what, aim, found, reached in aims(run.results.records):
            print(f"  {'  ' if reached else '! '}{what}: {found} ({aim})")
    print(f"\n{time.monotonic() - began:.0f} s; tables in {options.results}")


if __name__ == "__main__":
    main()
