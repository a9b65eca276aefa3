"""Fixtures of all tests of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.engine.watched_worker import WatchedWorker


@pytest.fixture
def make() -> Any:
    benches: list[WatchedWorker] = []

    def build(*args: Any, **kwargs: Any) -> WatchedWorker:
        benches.append(WatchedWorker(*args, **kwargs))
        return benches[-1]

    yield build
    for bench in benches:
        bench.worker.close()
