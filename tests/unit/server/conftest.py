from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.server.fake import close_workers


@pytest.fixture(autouse=True)
def workers() -> Iterator[None]:
    """End the threads that a test started."""
    yield
    close_workers()
