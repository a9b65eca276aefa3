"""Drafts that are right by chance, to measure speeds that depend on how many are: replies are no replies then."""

from __future__ import annotations

import itertools
import logging
import struct
from collections.abc import Callable

import numpy as np

from pyctl.engine.draft.draft_settings import SyntheticSettings
from pyctl.engine.sampling import RANDOM_SEED
from pyctl.errors import ConfigError

__all__ = ["SyntheticAcceptance", "acceptance_rates"]

log = logging.getLogger("pyctl")


def acceptance_rates(settings: SyntheticSettings, n_max: int) -> tuple[float, ...]:
    """How often each of ``n_max`` drafts is right, together with all before it; empty if nobody asked for that.

    ConfigError, in llama-server's words, for what cannot be.
    """
    length, given = settings.synth_length, settings.synth_rates
    if length == -1.0 and not given:
        return ()
    if length != -1.0 and given:
        raise ConfigError("synthetic acceptance length and rates are mutually exclusive")
    if n_max <= 0:
        raise ConfigError("synthetic acceptance requires at least one speculative token")
    if not given:
        if not 1.0 <= length <= n_max + 1.0:
            raise ConfigError(f"synthetic acceptance length must be finite and within [1, {n_max + 1}]")
        return _of_length(length, n_max)
    if len(given) != n_max:
        raise ConfigError(f"synthetic acceptance rates must contain {n_max} values, got {len(given)}")
    if not all(0.0 <= rate <= 1.0 for rate in given):
        raise ConfigError("synthetic acceptance rates must be finite and within [0, 1]")
    if any(later > rate for rate, later in itertools.pairwise(given)):
        raise ConfigError("synthetic acceptance rates must be monotonically non-increasing")
    return given


def _of_length(length: float, n_max: int) -> tuple[float, ...]:
    """Powers of one number that add up to ``length`` - 1."""
    if length in (1.0, n_max + 1.0):
        return (float(length > 1.0),) * n_max
    low, high = 0.0, 1.0
    for _ in range(32):
        middle = 0.5 * (low + high)
        if sum(middle**i for i in range(1, n_max + 1)) < length - 1.0:
            low = middle
        else:
            high = middle
    return tuple((0.5 * (low + high)) ** i for i in range(1, n_max + 1))


class SyntheticAcceptance:
    """An `Acceptance` by chance: for a seed, the chances are those of llama-server with that seed."""

    def __init__(self, rates: tuple[float, ...]) -> None:
        before = (1.0, *rates)
        self._chances = [rate / last if last > 0.0 else 0.0 for last, rate in zip(before, rates, strict=False)]
        self._draws: dict[int, Callable[[], float]] = {}
        log.warning("drafts are right by chance, for benchmarking: what is generated is not valid")

    def begin(self, key: int, seed: int) -> None:
        source = np.random.RandomState(None if seed == RANDOM_SEED else seed)

        def draw() -> float:
            low, high = struct.unpack("<II", source.bytes(8))
            return float((low + high * 2.0**32) / 2.0**64)

        self._draws[key] = draw

    def end(self, key: int) -> None:
        self._draws.pop(key, None)

    def draw(self, key: int, n: int) -> int:
        draw = self._draws[key]
        for i, chance in enumerate(self._chances[:n]):
            if not draw() < chance:
                return i
        return min(n, len(self._chances))
