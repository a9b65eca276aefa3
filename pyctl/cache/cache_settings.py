"""How much the prefix cache keeps, in memory and on disk."""

from __future__ import annotations

from dataclasses import dataclass

from pyctl.convert import directory, integer
from pyctl.errors import ConfigError, RequestError
from pyctl.limit import SetLimit
from pyctl.setting import CACHE, DISK

__all__ = ["CacheSettings", "DiskSettings"]


def policy(text: str) -> str:
    """In lower case, if it is a form that DiskPolicy.of_server takes."""
    # Only now: the policy compares tokens, with numpy, which --help does not need.
    from pyctl.cache.persist import MAX_COUNT, DiskPolicy

    try:
        DiskPolicy.of_server(text)
    except RequestError:
        known = f"off, full, auto, auto:N, N, with N from 1 to {MAX_COUNT}, spill, or one of them and ,spill"
        raise ValueError(f"{text!r} must be one of {known}") from None
    return text.lower()


@dataclass(frozen=True)
class CacheSettings:
    """The prefix cache in memory; ``ram_mib`` 0 turns it off."""

    n_slots: int = CACHE.flag(
        0,
        "--prefix-cache-slots",
        "most snapshots, 0 = as many as --cache-ram holds",
        integer(0),
        "PYCTL_PREFIX_CACHE_SLOTS",
        limit=SetLimit("snapshots in RAM, by number; 0 is no limit", "snapshots are evicted", "memory"),
    )
    ram_mib: int = CACHE.flag(
        8192,
        "-cram --cache-ram",
        "MiB of RAM for snapshots, -1 = no limit, 0 = no snapshots",
        integer(-1),
        "LLAMA_ARG_CACHE_RAM",
        limit=SetLimit("snapshots in RAM", "snapshots are evicted", "memory", "MiB"),
    )


@dataclass(frozen=True)
class DiskSettings:
    """The prefix cache on disk; without ``cache_dir`` there is none."""

    cache_dir: str = DISK.flag(
        "",
        "--kv-cache-dir",
        "directory of snapshots that survive restarts; pyctl creates it (default: none)",
        directory,
        "PYCTL_KV_CACHE_DIR",
        "DIR",
    )
    disk_mib: int = DISK.flag(
        16384,  # less than RAM has is of little use (bench/results/spill-4-gib.md)
        "--kv-cache-budget",
        "MiB of that directory, 0 = no limit",
        integer(0),
        "PYCTL_KV_CACHE_BUDGET",
        limit=SetLimit("files of the cache directory", "files are evicted", "disk", "MiB"),
    )
    min_tokens: int = DISK.flag(
        512, "--kv-cache-min-tokens", "do not write shorter prefixes", integer(0), "PYCTL_KV_CACHE_MIN_TOKENS"
    )
    cold_max: int = DISK.flag(
        10240,
        "--kv-cache-cold-max",
        "with policy full: also write the first tokens of longer prompts, at most N, 0 = never",
        integer(0),
        "PYCTL_KV_CACHE_COLD_MAX",
    )
    # Restores more than full in every shape of bench/results/policy.md, and writes less.
    disk_policy: str = DISK.flag(
        "auto:30,spill",
        "--disk-prefix-cache",
        "prefixes to write: off, full (whole prompts), auto:N (prefixes shared with the newest N "
        "prompts or the next ones), auto (auto:30) or N (the first N tokens); appending ,spill, or "
        "spill alone, also writes snapshots that RAM evicts and that pay",
        policy,
        "PYCTL_DISK_PREFIX_CACHE",
        "POLICY",
    )
    # 50 TB a year, where drives of 1 TB are made for 120: 300 to 900 turns of agents (bench/results/spill.md).
    daily_mib: int = DISK.flag(
        131_072,
        "--kv-cache-daily-writes",
        "most MiB written in one day, 0 = no limit",
        integer(0),
        "PYCTL_KV_CACHE_DAILY_WRITES",
        limit=SetLimit("bytes written within a day; 0 is no limit", "nothing more is written that day", "disk", "MiB"),
    )

    def __post_init__(self) -> None:
        if self.disk_policy.isdigit() and int(self.disk_policy) < self.min_tokens:
            raise ConfigError(
                f"--disk-prefix-cache {self.disk_policy} is below --kv-cache-min-tokens {self.min_tokens}: "
                "nothing would be written"
            )
