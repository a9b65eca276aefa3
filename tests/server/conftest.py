from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.fake import close_workers


@pytest.fixture(autouse=True)
def workers() -> Iterator[None]:
    """Ends the threads that a test began."""
    yield
    close_workers()
