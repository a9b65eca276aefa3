"""A simulated year: recorded sessions on the real engine, cache, disk and index, with faults.

    python -m bench.simulate --hours 24 --seed 7
    python -m bench.simulate --seconds 180 --seed 7       # as far as it gets
    python -m bench.simulate --households 15 --seed 1     # a year, shared by seeds 1 to 15
    python -m bench.simulate --seed 7 --until 3763        # the same, up to that step
    python -m bench.simulate --plant "lost sync of a file"
    python -m bench.simulate --plant all

One thread runs clients, servers and the machine; a seed decides everything, so that it replays to
the same step. Prompts have the recorded lengths, shared prefixes and pauses, a 128th of the size;
the model's next token depends on each stored row and on the state (bench/simulate/model.py). Reads
and writes fail, are short, hang or find the disk full; servers are killed at any write, and a power
failure takes unsynced bytes; memory lacks, evaluations fail, requests are cancelled, files are
damaged, the clock jumps, and a second server joins the directory.

Each reply has to equal the model's reply without a cache. Written files are whole and survive a
power failure, and index and files agree after each start. Exits with 1 at the first exception to
that, with the seed and the step; with --plant, if a planted fault is not found.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

from bench.simulate.planted import PLANTED, plant
from pyctl.processes.module_command import module_command

HASH_SEED = "PYTHONHASHSEED"
"""Sets of names have the same order in each run only with a fixed seed of hashes."""

QUICK_HOURS = 2.0

PLANTED_SEEDS = 3
"""Seeds that are tried for a planted fault."""

PLANTED_HOURS = 48.0
"""A planted fault has to show in so many hours of so many seeds."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the simulation; SystemExit with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=8760.0, help="of the clients' time")
    parser.add_argument("--seconds", type=float, default=0.0, help="end after these; 0 = never")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--households",
        type=int,
        default=1,
        metavar="N",
        help="run N at once, with the seeds from --seed on, each for its part of --hours",
    )
    parser.add_argument("--until", type=int, default=0, metavar="STEP", help="end at this step")
    parser.add_argument("--plant", metavar="NAME", help=f"{', '.join(PLANTED)}; or all")
    parser.add_argument("--quick", action="store_true", help="smoke test: two hours")
    parser.add_argument("--keep", action="store_true", help="write the tables to bench/results")
    options = parser.parse_args(argv)
    if options.households < 1 or (options.households > 1 and options.until):
        parser.error("--households is at least 1, and exactly 1 with --until")
    if options.quick and options.keep:
        parser.error("--quick measures nothing that is worth keeping")
    if options.quick:
        options.hours = QUICK_HOURS
    if options.plant and options.plant != "all" and options.plant not in PLANTED:
        parser.error(f"no planted fault {options.plant}")
    if os.environ.get(HASH_SEED) != "0":
        os.environ[HASH_SEED] = "0"
        arguments = sys.argv[1:] if argv is None else list(argv)
        command = [*module_command("bench.simulate"), *arguments]
        raise SystemExit(subprocess.run(command, check=False).returncode)
    if options.plant == "all":
        _plant_all(keep=options.keep)
    elif options.plant:
        plant(options.plant)
        _find_planted(options.plant, options.seed)
    else:
        _simulate(options)


def _simulate(options: argparse.Namespace) -> None:
    """Run the households side by side, each in a process of its own if there are several, and print
    their table; SystemExit with 1 if anything is wrong.
    """
    # Not before a fault could be planted.
    from bench.simulate.report import show_runs
    from bench.simulate.run import run_household

    hours = options.hours / options.households
    seeds = range(options.seed, options.seed + options.households)
    if options.households == 1:
        runs = [run_household(options.seed, hours, options.seconds, options.until)]
    else:
        with ProcessPoolExecutor(options.households, mp_context=get_context("spawn")) as pool:
            runs = list(pool.map(run_household, seeds, repeat(hours), repeat(options.seconds)))
    show_runs(runs, keep=options.keep)
    if any(run.wrong for run in runs):
        raise SystemExit(1)


def _find_planted(name: str, first_seed: int) -> None:
    """Look for the planted fault ``name`` with seeds from ``first_seed`` on. SystemExit if none
    finds it.
    """
    from bench.simulate.run import run_household

    for seed in range(first_seed, first_seed + PLANTED_SEEDS):
        run = run_household(seed, PLANTED_HOURS)
        if run.wrong:
            print(f"{name}\tseed {seed}\tstep {run.n_steps}\t{run.wrong}", flush=True)
            return
    raise SystemExit(f"{name}: not found with {PLANTED_SEEDS} seeds of {PLANTED_HOURS:g} hours")


def _plant_all(*, keep: bool) -> None:
    """Plant each fault in a new process; SystemExit with the names of the faults that no seed
    finds.
    """
    from bench.simulate.report import show_planted

    rows: list[list[str]] = []
    for name in PLANTED:
        command = [*module_command("bench.simulate"), "--plant", name]
        found = subprocess.run(command, check=False, capture_output=True, text=True)
        is_found = found.returncode == 0
        rows.append(found.stdout.strip().split("\t") if is_found else [name, "", "", "not found"])
        print(*rows[-1], sep=": ", flush=True)
    show_planted(rows, keep=keep)
    missed = [row[0] for row in rows if not row[1]]
    if missed:
        raise SystemExit(f"not found: {', '.join(missed)}")


if __name__ == "__main__":
    main()
