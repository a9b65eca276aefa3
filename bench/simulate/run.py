"""The run of a household from its first hour to its last."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from bench.simulate.audit import WrongError
from bench.simulate.household import Household
from bench.simulate.report import RunSummary, summarize
from bench.traces.recording import read_sessions

FAST = Path("/dev/shm")
"""A directory in memory, if the system has one: syncs are simulated anyway."""


def run_household(seed: int, hours: float, max_seconds: float = 0.0, until: int = 0) -> RunSummary:
    """Run one household for ``hours`` of its clients, and return the outcome.

    It ends before that at the first error of a server, after ``max_seconds`` seconds of this
    machine, and at the step ``until``; 0 means no such limit.
    """
    clock = time.monotonic
    began = clock()
    hours_so_far = 0.0
    wrong = ""
    parent = FAST if os.access(FAST, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        household = Household(read_sessions(), seed, Path(directory), until)
        try:
            for so_far in household.run(hours):
                hours_so_far = so_far
                if max_seconds and clock() - began > max_seconds:
                    break
        except WrongError as error:
            wrong = str(error)
    return summarize(household, seed, hours_so_far, clock() - began, wrong)
