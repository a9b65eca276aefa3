"""Settings of the engine for sequences and batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from pyctl.cache.device_limits import DeviceLimits
from pyctl.cache.plan import DEFAULT_STEP
from pyctl.engine.canary.canary_limits import CanaryLimits
from pyctl.settings.convert import integer, tokens
from pyctl.settings.limit import SetLimit, limit
from pyctl.settings.setting import CACHE, SERVER

__all__ = ["MAX_PREWARMS", "Clock", "EngineSettings", "PrewarmDelays"]

Clock: TypeAlias = Callable[[], float]
"""A monotonic clock in seconds: `time.monotonic`, or a fake clock in tests."""

MAX_PREWARMS = limit(16, "background requests that wait", "the oldest are dropped", "process")

AT_ONCE_SECONDS = 0.05
"""Delay after a reply, so that an immediate next request does not wait for a batch of a warm-up."""

QUIET_SECONDS = 1.0
"""Delay without client requests before a warm-up with little gain for the next turn."""

QUIET_BATCHES = 1
"""Such a warm-up also waits for the duration of this many batches, the longest that it can delay a
request.
"""


@dataclass(frozen=True)
class PrewarmDelays:
    """The time without a client's request before a background request starts.

    Attributes:
        at_once: Seconds before one that helps the next turn.
        quiet: Seconds before one with little gain, at least.
        quiet_batches: It also waits for the duration of so many batches.
    """

    at_once: float = AT_ONCE_SECONDS
    quiet: float = QUIET_SECONDS
    quiet_batches: int = QUIET_BATCHES


def idle_seconds(text: str) -> int:
    """Seconds from 1 up, or -1. Raises ValueError for others."""
    if (value := int(integer(-1)(text))) == 0:
        raise ValueError("0 seconds is too short; use -1 for never")
    return value


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine; flags explain the others.

    ``min_step``: tokens between the sparse cuts of a long message, 0 for none. ``exact``: requests
    run one at a time, and reuse only rows that a cold run computes the same way, so no generated
    text. ``clear_idle``: a request that runs alone uses all cells, as with one sequence.
    ``loop_guard``: a loop ends a reply. ``device`` limits the rows that leave the device,
    ``prewarm`` delays background requests,
    ``canary`` limits checks.
    """

    min_step: int = CACHE.flag(
        DEFAULT_STEP,
        "-cms --checkpoint-min-step",
        "tokens between snapshots within one long message, 0 = none within messages",
        tokens(0),
        "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",
    )
    exact: bool = CACHE.flag(
        False,
        "--exact",
        "evaluate one request at a time, and replies again as prompts: each reply depends on its "
        "request alone",
        None,
        "PYCTL_EXACT",
        off="--no-exact",
    )
    clear_idle: bool = CACHE.flag(
        True,
        "--cache-idle-slots",
        "save idle sequences to the cache when one request runs alone, not only when the context "
        "is full",
        None,
        "LLAMA_ARG_CACHE_IDLE_SLOTS",
        off="--no-cache-idle-slots",
    )
    canary_interval: int = CACHE.flag(
        3600,
        "--canary-interval",
        "idle seconds between two checks, which evaluate the end of a snapshot again and compare "
        "all bits, 0 = never",
        integer(0),
        "PYCTL_CANARY_INTERVAL",
        "SECONDS",
    )
    loop_guard: bool = SERVER.flag(
        False,
        "--loop-guard",
        "end a reply that repeats itself as its token limit would; without it such replies are "
        "only counted",
        None,
        "PYCTL_LOOP_GUARD",
        off="--no-loop-guard",
    )
    n_queue: int = SERVER.flag(
        512,
        "--queue",
        "maximum waiting replies; each choice and each prompt of a list counts",
        integer(1),
        "PYCTL_QUEUE",
        limit=SetLimit("waiting replies", "503 with Retry-After", "request"),
    )
    sleep_seconds: int = SERVER.flag(
        -1,
        "--sleep-idle-seconds",
        "seconds without a request after which the model is unloaded, -1 = never",
        idle_seconds,
        metavar="SECONDS",
    )
    stall_seconds: int = SERVER.flag(
        60,
        "--stall-timeout",
        "seconds without progress of the engine after which pyctl exits with an error, 0 = never",
        integer(0),
        "PYCTL_STALL_TIMEOUT",
        "SECONDS",
        limit=SetLimit(
            "no progress of the engine while it has work",
            "requests get 503; the process exits with code 1",
            "process",
            "s",
        ),
    )
    device: DeviceLimits = DeviceLimits()
    prewarm: PrewarmDelays = PrewarmDelays()
    canary: CanaryLimits = CanaryLimits()
