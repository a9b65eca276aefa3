"""Checks of memory and limits."""

from __future__ import annotations

import resource

from pyctl.doctor.facts import Facts
from pyctl.doctor.finding import Finding, UnknownError, wrong
from pyctl.machine.control_groups import memory_groups
from pyctl.machine.probe import meminfo

__all__ = ["container_memory", "memory_lock", "overcommit"]

GIB = 2**30

OTHERS = 2 * GIB
"""Bytes of RAM that a server takes without a model and a cache."""


def overcommit(facts: Facts) -> list[Finding]:
    """Check that the kernel grants address space beyond RAM, which CUDA and mapped models need."""
    if facts.number("proc/sys/vm/overcommit_memory") != 2:
        return []
    text = "vm.overcommit_memory is 2: CUDA and large models get no address space"
    return [wrong(text, "sudo sysctl vm.overcommit_memory=0")]


def memory_lock(facts: Facts) -> list[Finding] | None:
    """Check that the limit of locked memory is not below the model, with --mlock."""
    if not facts.requested.locks_memory:
        return None
    needed = sum(path.stat().st_size for path in facts.requested.model_files if path.is_file())
    soft, _ = facts.limit_of(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return []
    text = f"--mlock needs {_gib(needed)} of locked memory, the limit is {_gib(soft)}"
    return [wrong(text, "ulimit -l unlimited, or LimitMEMLOCK=infinity in the systemd unit")]


def container_memory(facts: Facts) -> list[Finding] | None:
    """Check that the memory limit of the container or service is above --cache-ram. Raises
    UnknownError if none can be read.
    """
    ram_bytes = facts.requested.ram_bytes
    if ram_bytes is None:
        return None
    limits = [group.limit for group in memory_groups(facts.root)]
    if not limits:
        raise UnknownError("no control group of this process is found below /sys/fs/cgroup")
    minimum = min(limits)
    if not (ram := meminfo("MemTotal", facts.root)):
        raise UnknownError("/proc/meminfo has no MemTotal")
    if minimum >= ram or minimum >= ram_bytes + OTHERS:
        return []
    text = f"this container may use {_gib(minimum)}, the cache in RAM alone {_gib(ram_bytes)}"
    return [wrong(text, f"--cache-ram {minimum // 2 // 2**20}, or give the container more memory")]


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / 2**20:.0f} MiB"
