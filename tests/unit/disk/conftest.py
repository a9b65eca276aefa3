"""Stores in a temporary directory, closed when a test ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyctl.cache.snapshot import Snapshot
from tests.unit.disk.making import DirectStore, conversation
from tests.unit.engine.drive import ManualClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The time of the day stands still at noon, unless it is advanced."""
    clock = ManualClock()
    clock.now = time.time() // 86_400 * 86_400 + 43_200
    monkeypatch.setattr(time, "time", clock)
    return clock


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., DirectStore]]:
    """open_store(fingerprint="model", budget=None, directory=..., **options)."""
    opened: list[DirectStore] = []

    def get(
        fingerprint: str = "model",
        budget: int | None = None,
        directory: Path | None = None,
        **options: int | None,
    ) -> DirectStore:
        store = DirectStore(directory or tmp_path / "cache", fingerprint, budget, **options)  # type: ignore[arg-type]
        opened.append(store)
        return store

    yield get
    for store in opened:
        store.close()


@pytest.fixture
def made() -> list[Snapshot]:
    return conversation(3)


@pytest.fixture
def store(open_store: Callable[..., DirectStore], made: list[Snapshot]) -> DirectStore:
    store = open_store()
    for each in made:
        store.write(each)
    return store
