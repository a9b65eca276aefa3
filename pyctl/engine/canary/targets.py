"""The choice of the snapshot to check, and of the place whose bytes count."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from pyctl.cache.ports import StoredChecks
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Prefix, Snapshot

__all__ = ["Place", "Target", "TargetChoice", "find_targets", "has_all_in_ram"]

Place: TypeAlias = Literal["device", "ram", "disk"]
"""The source of the bytes of a check."""

NEW_WEIGHT = 16
"""The factor by which a snapshot that was not checked yet is likelier to be chosen."""

MAX_REMEMBERED = 4096
"""Checks that are remembered: half a year of hours."""


class Target(NamedTuple):
    """A snapshot of ``prefix`` and the ``place`` whose bytes are checked."""

    prefix: Prefix
    place: Place


def find_targets(cache: RamCache, disk: StoredChecks | None, *, has_rows: bool) -> list[Target]:
    """Return all targets: a snapshot counts once for each place that has all of its bytes.

    A state is always in RAM, so ``device`` are the rows there. Without ``has_rows`` a snapshot is
    its state.
    """
    targets: list[Target] = []
    for snapshot in cache.snapshots():
        if not has_rows or has_all_in_ram(snapshot):
            targets.append(Target(snapshot.prefix, "ram"))
        if any(segment.held is not None for segment in snapshot.chain):
            targets.append(Target(snapshot.prefix, "device"))
    if disk is not None:
        targets += [Target(prefix, "disk") for prefix in disk.prefixes()]
    return targets


def has_all_in_ram(snapshot: Snapshot) -> bool:
    """Return whether RAM has all rows of ``snapshot``."""
    return all(segment.rows.size for segment in snapshot.chain)


class TargetChoice:
    """A random order of targets, in which targets that were not checked yet are mostly first."""

    def __init__(self, seed: int | None) -> None:
        """Start with no checks; ``seed`` makes the order repeatable."""
        self._random = random.Random(seed)
        self._checked: OrderedDict[Target, None] = OrderedDict()

    @property
    def n_remembered(self) -> int:
        """The number of targets that are remembered as checked."""
        return len(self._checked)

    def in_order(self, targets: Sequence[Target]) -> Iterator[Target]:
        """Yield ``targets``, each once."""
        left = list(targets)
        while left:
            weights = [1 if target in self._checked else NEW_WEIGHT for target in left]
            (chosen,) = self._random.choices(left, weights)
            left.remove(chosen)
            yield chosen

    def one_of(self, positions: Sequence[int]) -> int:
        """Return a random one of ``positions``."""
        return self._random.choice(positions)

    def record(self, target: Target) -> None:
        """Record that ``target`` was checked, or cannot be."""
        self._checked[target] = None
        self._checked.move_to_end(target)
        if len(self._checked) > MAX_REMEMBERED:
            self._checked.popitem(last=False)
