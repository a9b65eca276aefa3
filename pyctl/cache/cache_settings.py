"""Settings of the prefix cache: its sizes in memory and on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pyctl.errors import ConfigError, RequestError
from pyctl.files.user_directory import user_directory
from pyctl.settings.convert import directory, integer, number, tokens
from pyctl.settings.limit import SetLimit
from pyctl.settings.setting import CACHE, DISK

__all__ = ["DEFAULT_DAILY_MIB", "FREE_PART", "CacheSettings", "DiskSettings", "default_directory"]

DEFAULT_DAILY_MIB = 32_768
FREE_PART = 10
"""Bounds of the default directory: MiB written per day, and the part of the free space that the
files may take.
"""

GIVEN_DAILY_MIB = 131_072
"""MiB written per day to a directory that a flag names: 50 TB a year, where drives of 1 TB are
rated for 120. These are 300 to 900 turns of agents (bench/results/spill.md of 1323d1c8).
"""


def default_directory(environ: Mapping[str, str]) -> Path:
    """Return the default cache directory of the user. Raises RuntimeError if the user has no home
    directory.
    """
    return user_directory("cache", environ) / "kv"


def policy(text: str) -> str:
    """Return ``text`` in lower case. Raises ValueError unless it is a form that
    DiskPolicy.from_flag takes.
    """
    # Only now: the policy compares tokens, with numpy, which --help does not need.
    from pyctl.cache.disk_policy import MAX_COUNT, DiskPolicy

    try:
        DiskPolicy.from_flag(text)
    except RequestError:
        known = (
            f"off, full, auto, auto:N, N, with N from 1 to {MAX_COUNT}, spill, or one of them "
            "and ,spill"
        )
        raise ValueError(f"{text!r} must be one of {known}") from None
    return text.lower()


STORES = ("s3", "gs", "az", "file", "memory")


def store_url(text: str) -> str:
    """Return ``text`` if it is the address of a store. Raises ValueError for others, and for one
    that holds a key, without quoting it.
    """
    scheme, _, rest = text.partition("://")
    if (
        scheme not in STORES
        or (scheme == "file" and not rest.startswith("/"))
        or not (rest or scheme == "memory")
    ):
        raise ValueError(
            f"it must begin with {', '.join(f'{each}://' for each in STORES)}, file:// with a "
            "whole path"
        )
    if any(letter in rest for letter in "@?#"):
        raise ValueError("it may contain neither key nor query: set keys in the environment")
    return text


@dataclass(frozen=True)
class CacheSettings:
    """The prefix cache in memory; ``ram_mib`` 0 turns it off, -1 is no limit, None is for the free
    memory to decide.
    """

    n_slots: int = CACHE.flag(
        0,
        "--prefix-cache-slots",
        "maximum snapshots, 0 = as many as --cache-ram holds",
        integer(0),
        "PYCTL_PREFIX_CACHE_SLOTS",
        limit=SetLimit(
            "snapshots in RAM, by number; 0 is no limit", "snapshots are evicted", "memory"
        ),
    )
    ram_mib: int | None = CACHE.flag(
        None,
        "-cram --cache-ram",
        "MiB of RAM for snapshots, -1 = no limit, 0 = no snapshots",
        integer(-1),
        "LLAMA_ARG_CACHE_RAM",
        shown=(
            "half of the RAM that is free once the model is loaded, or 8192 if that is more and "
            "fits"
        ),
        limit=SetLimit("MiB of snapshots in RAM", "snapshots are evicted", "memory"),
    )


@dataclass(frozen=True)
class DiskSettings:
    """The prefix cache on disk; without ``cache_dir`` there is none.

    ``is_default``: no flag names the directory, so serving goes on without it if it cannot be used.
    The files may take one ``free_part``-th of the free space, 0 for no such bound. Raises
    ConfigError if nothing would be written.
    """

    cache_dir: str = DISK.flag(
        "",
        "--kv-cache-dir",
        "directory of snapshots that survive restarts; pyctl creates it",
        directory,
        "PYCTL_KV_CACHE_DIR",
        "DIR",
        shown="$XDG_CACHE_HOME/pyctl/kv, none for the built-in model",
    )
    kv_cache: bool = DISK.flag(
        True,
        "--kv-cache",
        "keep snapshots on disk; --no-kv-cache: do not",
        None,
        "PYCTL_KV_CACHE",
        off="--no-kv-cache",
    )
    disk_mib: int = DISK.flag(
        16384,  # less than RAM has is of little use (bench/results/spill-4-gib.md of 1323d1c8)
        "--kv-cache-budget",
        "MiB of that directory, 0 = no limit; in the default one at most a tenth of the free "
        "space, unless given",
        integer(0),
        "PYCTL_KV_CACHE_BUDGET",
        limit=SetLimit(
            "files of the cache directory; in the default one at most a tenth of the free space",
            "files are evicted",
            "disk",
            "MiB",
        ),
    )
    min_tokens: int = DISK.flag(
        512,
        "--kv-cache-min-tokens",
        "write no shorter prefix but the last",
        tokens(0),
        "PYCTL_KV_CACHE_MIN_TOKENS",
    )
    cold_max: int = DISK.flag(
        10240,
        "--kv-cache-cold-max",
        "with policy full: also write the first tokens of longer prompts, at most N, 0 = never",
        integer(0),
        "PYCTL_KV_CACHE_COLD_MAX",
    )
    interim_seconds: float = DISK.flag(
        5.0,
        "--kv-cache-interim",
        "write snapshots of a prompt while it is evaluated, each time that this many seconds of "
        "evaluation and a sixteenth of the prompt are not on disk, 0 = never",
        number(0),
        "PYCTL_KV_CACHE_INTERIM",
        "SECONDS",
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
    daily_mib: int = DISK.flag(
        GIVEN_DAILY_MIB,
        "--kv-cache-daily-writes",
        "maximum MiB written per day, 0 = no limit",
        integer(0),
        "PYCTL_KV_CACHE_DAILY_WRITES",
        shown=f"{DEFAULT_DAILY_MIB}; {GIVEN_DAILY_MIB} with --kv-cache-dir",
        limit=SetLimit(
            "MiB written within a day; 0 is no limit", "nothing more is written that day", "disk"
        ),
    )
    receipts: bool = DISK.flag(
        True,
        "--receipts",
        "keep a receipt of each exact reply for a day, for pyctl verify; --no-receipts: do not",
        None,
        "PYCTL_RECEIPTS",
        off="--no-receipts",
    )
    store_url: str = DISK.flag(
        "",
        "--kv-store",
        "object store for that directory's files, which servers may share: s3://, gs://, az://, "
        "file:// or memory://; "
        "keys come from the environment; needs obstore",
        store_url,
        "PYCTL_KV_STORE",
        "URL",
    )
    is_default: bool = False
    free_part: int = 0

    def __post_init__(self) -> None:
        if self.disk_policy.isdigit() and int(self.disk_policy) < self.min_tokens:
            raise ConfigError(
                f"--disk-prefix-cache {self.disk_policy} is below --kv-cache-min-tokens "
                f"{self.min_tokens}: "
                "nothing would be written"
            )
