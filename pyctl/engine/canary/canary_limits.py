"""The limits of the canary, with their reasons."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CanaryLimits"]

QUIET_SECONDS = 30.0
"""Time without work before a check starts: a pause between two requests of an agent is shorter."""

SECONDS_A_DAY = 60.0
"""Seconds of a day that checks may take: 0.07 % of it. 24 checks of a batch of 512 tokens take
about 20 s on an RTX 3090 that evaluates 673 tokens/s.
"""

SECONDS_A_CHECK = 15.0
"""A check that is expected to take more is skipped, so that one snapshot cannot use up a day."""


@dataclass(frozen=True)
class CanaryLimits:
    """The limits of the canary.

    Attributes:
        quiet: Seconds without work before a check starts, at most its interval.
        a_day: Seconds of a day that checks may take.
        a_check: The maximum of seconds that one check is expected to take.
        seed: The seed of the choice of snapshots, None for a random one.
    """

    quiet: float = QUIET_SECONDS
    a_day: float = SECONDS_A_DAY
    a_check: float = SECONDS_A_CHECK
    seed: int | None = None
