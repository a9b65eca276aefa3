"""The check that ships: each kind of damage is told."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pyctl.cache.check import find_inconsistencies
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import PromptMatch, Segment, Snapshot, State
from pyctl.prompt import as_tokens


def filled() -> RamCache:
    """Return two snapshots, one on the other's rows."""
    cache = RamCache(4, 10_000)
    tokens = as_tokens(range(20))
    match = PromptMatch(tokens)
    segment = None
    for first, last in ((0, 10), (10, 20)):
        segment = Segment(first, tokens[first:last], np.zeros(10, np.uint8), segment, (last,))
        assert cache.add(
            Snapshot(match.prefix(last), segment, State.from_parts(np.zeros(8, np.uint8)))
        )
    return cache


@pytest.mark.parametrize(
    ("part", "name", "value", "told"),
    [
        (
            lambda cache: cache.snapshots()[0].segment,
            "tokens",
            as_tokens(range(1, 11)),
            "tokens that do not match its",
        ),
        (
            lambda cache: cache.snapshots()[0].segment,
            "references",
            3,
            "[0, 10) counts 3 references, 2 are there",
        ),
        (
            lambda cache: cache.snapshots()[1].segment,
            "rows",
            np.zeros(30, np.uint8),
            "counts 116 bytes, 136 are there",
        ),
        (
            lambda cache: cache.index,
            "pinned",
            set(filled().snapshots()[:1]),
            "a pinned snapshot is missing",
        ),
        (lambda cache: cache.budget, "limit", 10, "bytes, at most 10 are allowed"),
    ],
)
def test_damage_is_told(
    part: Callable[[RamCache], object], name: str, value: object, told: str
) -> None:
    cache = filled()
    assert find_inconsistencies(cache) == []
    setattr(part(cache), name, value)
    assert told in "\n".join(find_inconsistencies(cache))
