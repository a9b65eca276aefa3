"""The positions at which sequences of each kind of memory may be saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pyctl.cache.resume_points import ANYWHERE, ResumePoints
from pyctl.llama.memory.memory_check import describe, find_resume_points

N_CELLS = 4096


@pytest.mark.parametrize(
    ("kind", "window", "places"),
    [
        ("attention", (0, 0), ANYWHERE),
        ("hybrid", (0, 0), ANYWHERE),
        ("hybrid", (64, 256), ANYWHERE),
        ("opaque", (64, 256), ResumePoints(64, 256)),
        ("opaque", (64, N_CELLS), ResumePoints(64, 0)),
        ("opaque", (0, 0), ANYWHERE),
    ],
)
def test_only_windows_of_whole_sequences_have_places(
    kind: str, window: tuple[int, int], places: ResumePoints
) -> None:
    memory: Any = SimpleNamespace(
        kind=kind, window=window, can_hold=kind != "opaque", type="llama_kv_cache_iswa", reason=""
    )
    assert find_resume_points(memory, N_CELLS) == places
    assert ("resumed within 64 tokens" in describe(memory, places)) == (places != ANYWHERE)
