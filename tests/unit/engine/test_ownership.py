"""The check of the thread rule: it reports a foreign thread, and not the owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.worker import Worker
from tests import ownership
from tests.fake import FakeBackend
from tests.unit.server.fake import INFO

FOREIGN: dict[str, Callable[[Engine], Any]] = {
    "Engine": lambda engine: engine.step(),
    "PrefixCache": lambda engine: engine.prefix_cache.park(engine.sequences[0]),
    "RamCache": lambda engine: engine.prefix_cache.cache.clear(),
    "LiveSequence": lambda engine: engine.sequences[0].truncate(0),
    "FakeMemory": lambda engine: engine.backend.synchronize(),
}


@pytest.mark.parametrize("owned", FOREIGN)
def test_a_foreign_thread_is_seen_and_the_owner_is_not(owned: str) -> None:
    engine = Engine(FakeBackend(), RamCache(4, None), EngineSettings())
    touch = FOREIGN[owned]
    touch(engine)  # no worker runs it yet
    worker = Worker(engine, INFO)
    try:
        worker.call(lambda: touch(engine)).result(timeout=60)
        with pytest.raises(AssertionError, match=f"{owned}.* not pyctl-engine"):
            touch(engine)
        assert len(ownership.violations) == 1
        ownership.violations.clear()
    finally:
        worker.close()
    touch(engine)
