from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyctl.engine import idle
from tests.unit.server.fake import close_workers


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the threads that a test started. However long it takes, nothing moves from the device for
    want of work.
    """
    monkeypatch.setattr(idle, "IDLE_SECONDS", 3600.0)
    yield
    close_workers()
