"""Warnings and the table of a memory plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pyctl.llama.settings.memory_plan import MIB, MemoryPlan, Place, Usage


def test_warnings_about_the_host() -> None:
    place = Place("host", False, Usage(1000 * MIB, 500 * MIB), 2000 * MIB)
    plan = MemoryPlan(4096, 1, 1.0, 0, (place,))
    assert list(plan.warnings(400 * MIB)) == []
    (large,) = plan.warnings(800 * MIB)
    assert large.startswith(
        "the prefix cache may grow to 800 MiB, 500 MiB are left; to fix it: --cache-ram 250"
    )
    assert "no limit" in next(plan.warnings(None))
    (short,) = replace(plan, places=(replace(place, free=1400 * MIB),)).warnings(0)
    assert short.startswith("the host has 100 MiB of memory too little")


USAGE = Usage(15_000 * MIB, 3_400 * MIB, 300 * MIB, 500 * MIB)
DRAFTING = replace(USAGE, states=600 * MIB, state_history=1_800 * MIB, drafts=700 * MIB)
HOST = Usage(680 * MIB, 0, 0, 30 * MIB)


@pytest.mark.parametrize(
    ("usage", "n_state_history", "gpu", "host"),
    [
        (USAGE, 0, "15,000 3,400 300 500 - 19,200 24,000", "680 - - 30 8,192 8,902 ?"),
        (
            DRAFTING,
            3,
            "15,000 3,400 600 1,800 700 500 - 22,000 24,000",
            "680 - - - - 30 8,192 8,902 ?",
        ),
    ],
)
def test_the_table_adds_up_with_and_without_drafts(
    usage: Usage, n_state_history: int, gpu: str, host: str
) -> None:
    """The lines of the table add up to its totals, each place in its column, with lines for drafts
    only where some are planned; the advice on a shortage names drafts first.
    """
    places = Place("CUDA0", True, usage, 24_000 * MIB), Place("host", False, HOST, None)
    plan = MemoryPlan(102_400, 1, 34_816.0, 150 * MIB, places, (), n_state_history)
    lines = list(plan.lines(8192 * MIB))
    assert [line.split()[-2] for line in lines] == ["CUDA0", *gpu.split()]
    assert [line.split()[-1] for line in lines] == ["host", *host.split()]
    assert len({len(line) for line in lines}) == 1
    titles = [re.split(r"\s{2,}", line)[0] for line in lines]
    assert titles[-4:] == [
        "compute buffers",
        "prefix cache, at most (--cache-ram)",
        "total",
        "free now",
    ]
    assert any(line.startswith("3 rollback states of each") for line in lines) == bool(
        n_state_history
    )
    short = replace(plan, places=(replace(places[0], free=usage.total - 1_000 * MIB), places[1]))
    helps = "--spec-type none, " if n_state_history else ""
    (warning,) = short.warnings(0)
    assert warning.startswith(f"CUDA0 has 1,000 MiB too little; to fix it: {helps}")
