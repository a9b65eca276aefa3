"""Defaults of the prefix cache in memory, which depend on the machine.

docs/internals/decisions/006-defaults.md has the reasons for the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pyctl.cache.cache_settings import CacheSettings
from pyctl.cli.arguments import CommandSettings
from pyctl.llama.library.devices import host_available
from pyctl.llama.settings.memory_plan import MemoryPlan

__all__ = ["cache_budget", "with_shared_budget"]

MIB = 2**20
GIB = 2**30

USUAL_RAM = 8 * GIB
"""llama-server's default of --cache-ram."""

MIN_RAM = GIB // 2
"""A smaller cache holds too few snapshots of a large model to be of use."""

OTHERS_RAM = 2 * GIB
"""Memory that the least budget leaves to other programs and to the page cache."""


def cache_budget(settings: CacheSettings, plan: MemoryPlan | None) -> int | None:
    """Return the bytes of RAM for snapshots, None for no limit; without --cache-ram from the memory
    that ``plan`` leaves free.

    Half of the rest; if that is below 8 GiB, as much as fits with the half of it that may wait for
    the disk.
    """
    if settings.ram_mib is not None:
        return None if settings.ram_mib < 0 else settings.ram_mib * MIB
    if plan is None or plan.host.free is None:
        return USUAL_RAM
    return _choose_part(plan.host.free - plan.host.usage.total)


def _choose_part(left: int) -> int:
    minimum = min((left - OTHERS_RAM) * 2 // 3, USUAL_RAM)
    return max(left // 2, minimum, MIN_RAM) // MIB * MIB


def with_shared_budget(
    settings: CommandSettings, free_ram: Callable[[], int | None] = host_available
) -> CommandSettings:
    """Set the budget of RAM that several models share, from the memory that is free before any of
    them is loaded.
    """
    free = free_ram()
    if settings.cache.ram_mib is not None or free is None:
        return settings
    return replace(settings, cache=replace(settings.cache, ram_mib=_choose_part(free) // MIB))
