"""Defaults that depend on the machine: bytes of RAM for snapshots."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from pyctl.cache.cache_settings import CacheSettings
from pyctl.cli.arguments import CommandSettings, parse_serve
from pyctl.cli.defaults import cache_budget, with_shared_budget
from pyctl.llama.settings.memory_plan import MemoryPlan, Place, Usage

MIB = 2**20
GIB = 2**30


def settings_of(*flags: str, home: Path) -> CommandSettings:
    return parse_serve(["-m", "m.gguf", *flags], {"XDG_CACHE_HOME": str(home)})


def plan_of(free: float | None, used: float = 0.7) -> MemoryPlan:
    """Return a model that takes ``used`` GiB of RAM where ``free`` GiB are available."""
    usage = Usage(weights=int(used * GIB))
    return MemoryPlan(
        65_536, 4, 65_536.0, 150 * MIB, (Place("host", False, usage, free and int(free * GIB)),)
    )


@pytest.mark.parametrize(
    ("free", "used", "chosen"),
    [
        (119, 0.7, 59.15),  # of 128 GB
        (58, 0.7, 28.65),  # of 64 GB
        (27, 0.7, 13.15),  # of 32 GB
        (27, 12.0, 8.0),  # the same, with experts in RAM
        (13, 0.7, 6.87),  # of 16 GB
        (6, 0.7, 2.65),
        (1, 0.7, 0.5),
        (16, 40.0, 0.5),  # the weights alone are more than there is
    ],
)
def test_snapshots_get_half_of_what_is_left(free: float, used: float, chosen: float) -> None:
    budget = cache_budget(CacheSettings(), plan_of(free, used))
    assert budget is not None
    assert budget / GIB == pytest.approx(chosen, abs=0.01)
    assert budget % MIB == 0


def test_a_given_budget_is_that_of_llama_server() -> None:
    for mib, found in ((-1, None), (0, 0), (100, 100 * MIB), (10**6, 10**6 * MIB)):
        assert cache_budget(CacheSettings(ram_mib=mib), plan_of(16)) == found
    for unknown in (None, plan_of(None)):
        assert cache_budget(CacheSettings(), unknown) == 8 * GIB


def test_several_models_share_half_of_what_is_free(tmp_path: Path) -> None:
    given = settings_of("--cache-ram", "100", home=tmp_path)
    for free, mib in ((119 * GIB, 60928), (13 * GIB, 7509), (None, None)):
        free_ram = partial(int, free) if free is not None else (lambda: None)
        shared = with_shared_budget(settings_of(home=tmp_path), free_ram)
        assert shared.cache.ram_mib == mib
        assert with_shared_budget(given, free_ram).cache.ram_mib == 100
