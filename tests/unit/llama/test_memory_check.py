"""Where sequences of each kind of memory may be saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pyctl.cache import ANYWHERE, ResumePlaces
from pyctl.llama.memory_check import describe, places_of

N_CELLS = 4096


@pytest.mark.parametrize(
    ("kind", "window", "on_gpu", "places"),
    [
        ("attention", (0, 0), True, ANYWHERE),
        ("hybrid", (0, 0), True, ANYWHERE),
        ("hybrid", (64, 256), False, ANYWHERE),
        ("hybrid", (64, 256), True, ResumePlaces(64, 256)),
        ("hybrid", (64, N_CELLS), True, ResumePlaces(64, 0)),
        ("opaque", (64, 256), False, ResumePlaces(64, 256)),
        ("opaque", (0, 0), True, ANYWHERE),
    ],
)
def test_windows_are_resumed_where_the_device_has_shown_equal_bits(
    kind: str, window: tuple[int, int], on_gpu: bool, places: ResumePlaces
) -> None:
    memory: Any = SimpleNamespace(kind=kind, window=window, can_hold=kind != "opaque", type="llama_kv_cache_iswa")
    assert places_of(memory, N_CELLS, on_gpu=on_gpu) == places
    assert ("resumed within 64 tokens" in describe(memory, places)) == (places != ANYWHERE)
