"""The prefix cache: snapshots on the device, in RAM and on disk. It handles bytes and tokens only.

The engine uses `prefix_cache.PrefixCache`, and gives it a memory and a store, which `ports`
describes. The disk package imports the cache, and never the other way round.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyctl.cache.block_sizes import BlockSizes
    from pyctl.cache.cache_settings import (
        DEFAULT_DAILY_MIB,
        FREE_PART,
        CacheSettings,
        DiskSettings,
        default_directory,
    )
    from pyctl.cache.cache_stats import (
        SHOWN,
        CacheStats,
        CacheView,
        Divergence,
        KnownParts,
        LiveView,
        RequestStats,
        view_of,
    )
    from pyctl.cache.check import faults
    from pyctl.cache.costs import Costs
    from pyctl.cache.device_copies import max_unwritten
    from pyctl.cache.device_tier import DeviceCounts
    from pyctl.cache.disk_policy import DiskPolicy
    from pyctl.cache.lookup import CacheLookup, CachePlan
    from pyctl.cache.plan import (
        DEFAULT_STEP,
        MIN_BATCH,
        RULES,
        batch_ends,
        snapshot_ends,
    )
    from pyctl.cache.ports import (
        AGAIN_SECONDS,
        CacheOptions,
        CacheRequest,
        Entry,
        MemoryShape,
        SequenceMemory,
        Store,
    )
    from pyctl.cache.positions import ends_within, last_end
    from pyctl.cache.prefix_cache import PrefixCache
    from pyctl.cache.ram import RamCache
    from pyctl.cache.ram_budget import RamBudget
    from pyctl.cache.reads import Reading, Reads
    from pyctl.cache.recent import RecentPrompts
    from pyctl.cache.resume_points import ANYWHERE, NOWHERE, ResumePoints
    from pyctl.cache.saved_time import Saved, SavedTime
    from pyctl.cache.saver import Saver
    from pyctl.cache.sequence import LiveSequence
    from pyctl.cache.snapshot import (
        NOTHING,
        Block,
        BlockBytes,
        HeldRows,
        Prefix,
        PromptFacts,
        PromptMatch,
        Rows,
        Snapshot,
        Source,
        Span,
        State,
    )

_MODULES = (
    "cache_settings",
    "plan",
    "positions",
    "disk_policy",
    "resume_points",
    "snapshot",
    "sequence",
    "cache_stats",
    "saved_time",
    "block_sizes",
    "reads",
    "ports",
    "recent",
    "ram",
    "ram_budget",
    "device_copies",
    "device_tier",
    "lookup",
    "saver",
    "prefix_cache",
    "check",
)
"""Where a name is looked for, in this order."""

__all__ = [
    "AGAIN_SECONDS",
    "ANYWHERE",
    "DEFAULT_DAILY_MIB",
    "DEFAULT_STEP",
    "FREE_PART",
    "MIN_BATCH",
    "NOTHING",
    "NOWHERE",
    "RULES",
    "SHOWN",
    "Block",
    "BlockBytes",
    "BlockSizes",
    "CacheLookup",
    "CacheOptions",
    "CachePlan",
    "CacheRequest",
    "CacheSettings",
    "CacheStats",
    "CacheView",
    "Costs",
    "DeviceCounts",
    "DiskPolicy",
    "DiskSettings",
    "Divergence",
    "Entry",
    "HeldRows",
    "KnownParts",
    "LiveSequence",
    "LiveView",
    "MemoryShape",
    "Prefix",
    "PrefixCache",
    "PromptFacts",
    "PromptMatch",
    "RamBudget",
    "RamCache",
    "Reading",
    "Reads",
    "RecentPrompts",
    "RequestStats",
    "ResumePoints",
    "Rows",
    "Saved",
    "SavedTime",
    "Saver",
    "SequenceMemory",
    "Snapshot",
    "Source",
    "Span",
    "State",
    "Store",
    "batch_ends",
    "default_directory",
    "ends_within",
    "faults",
    "last_end",
    "max_unwritten",
    "snapshot_ends",
    "view_of",
]


def __getattr__(name: str) -> object:
    for module in _MODULES if name in __all__ else ():
        home = importlib.import_module(f".{module}", __name__)
        if hasattr(home, name):
            return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
