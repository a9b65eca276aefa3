"""The benchmarks are scripts beside each other: their folders must be on the path to import what they share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="session", autouse=True)
def _paths() -> Iterator[None]:
    before, loaded = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(BENCH), str(BENCH / "gpu")]
    yield
    sys.path[:] = before
    for name in set(sys.modules) - loaded:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCH)):
            del sys.modules[name]
