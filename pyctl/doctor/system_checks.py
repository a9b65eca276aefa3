"""Checks of memory, swap, limits and the CPU."""

from __future__ import annotations

import resource

from pyctl.doctor.facts import Facts
from pyctl.doctor.finding import Finding, UnknownError, slow, wrong
from pyctl.setup.control_groups import memory_groups

__all__ = ["container_memory", "cpu_governor", "memory_lock", "overcommit", "swap", "windows_memory"]

GIB = 2**30

USUAL_CACHE, OTHERS = 8 * GIB, 2 * GIB
"""Bytes of a cache in RAM, and of what else a server takes of it without a model."""

MOST_SWAPPED = 2**29
"""Bytes in swap that any desktop has after some days."""

MOST_SWAPPINESS = 60
"""The kernel's own default."""

SLOW_GOVERNORS = ("powersave", "conservative", "userspace")

OWN_POLICY = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose `powersave` follows the load."""


def overcommit(facts: Facts) -> list[Finding]:
    """The kernel grants address space beyond RAM, which CUDA and mapped models need."""
    if facts.number("proc/sys/vm/overcommit_memory") != 2:
        return []
    text = "vm.overcommit_memory is 2: CUDA and large models get no address space"
    return [wrong(text, "sudo sysctl vm.overcommit_memory=0")]


def swap(facts: Facts) -> list[Finding]:
    """Programs are in RAM, not in swap."""
    total, free = facts.meminfo.get("SwapTotal", 0), facts.meminfo.get("SwapFree", 0)
    if total - free <= MOST_SWAPPED:
        return []
    text = f"{_gib(total - free)} are in swap: what is there comes back at the speed of a disk"
    if facts.number("proc/sys/vm/swappiness") > MOST_SWAPPINESS:
        return [slow(text, "sudo sysctl vm.swappiness=10")]
    return [slow(text, "end programs or lower --cache-ram, then sudo swapoff -a && sudo swapon -a")]


def memory_lock(facts: Facts) -> list[Finding] | None:
    """With --mlock, the limit of locked memory is not below the model."""
    if not facts.wishes.locks_memory:
        return None
    needed = sum(path.stat().st_size for path in facts.wishes.model_files if path.is_file())
    soft, _ = facts.limit_of(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return []
    text = f"--mlock needs {_gib(needed)} of locked memory, the limit is {_gib(soft)}"
    return [wrong(text, "ulimit -l unlimited, or LimitMEMLOCK=infinity in the systemd unit")]


def container_memory(facts: Facts) -> list[Finding] | None:
    """The memory limit of the container or service is above --cache-ram; the default size keeps to the limit."""
    wanted = facts.wishes.ram_bytes
    if wanted is None:
        return None
    limits = [group.limit for group in memory_groups(facts.root)]
    if not limits:
        raise UnknownError("no control group of this process is found below /sys/fs/cgroup")
    least = min(limits)
    if least >= facts.ram_bytes or least >= wanted + OTHERS:
        return []
    text = f"this container may use {_gib(least)}, the cache in RAM alone {_gib(wanted)}"
    return [wrong(text, f"--cache-ram {least // 2 // 2**20}, or give the container more memory")]


def windows_memory(facts: Facts) -> list[Finding] | None:
    """WSL2 has enough of Windows' memory, of which it takes half by default."""
    if not facts.is_wsl:
        return None
    wanted = USUAL_CACHE if facts.wishes.ram_bytes is None else facts.wishes.ram_bytes
    needed = wanted + 2 * OTHERS
    if facts.ram_bytes >= needed:
        return []
    text = f"WSL has {_gib(facts.ram_bytes)}, of which the cache in RAM would take {_gib(wanted)}"
    mend = rf"memory={-(-needed // GIB)}GB below [wsl2] in %UserProfile%\.wslconfig, then wsl --shutdown"
    return [slow(text, mend)]


def cpu_governor(facts: Facts) -> list[Finding] | None:
    """The CPU's clock follows the load."""
    place = "sys/devices/system/cpu/cpu0/cpufreq"
    if not facts.has(place):
        return None  # virtual machines: the host decides
    governor, own = facts.text(f"{place}/scaling_governor").strip(), facts.text(f"{place}/scaling_driver").strip()
    if governor not in SLOW_GOVERNORS or (governor == "powersave" and own in OWN_POLICY):
        return []
    text = f"the CPU runs with the governor {governor}"
    return [slow(text, "sudo cpupower frequency-set -g schedutil")]


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / 2**20:.0f} MiB"
