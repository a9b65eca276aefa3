"""Fixtures of all tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def disk_that_is_only_slow() -> Iterator[None]:
    """A busy machine may return nothing for seconds: only a test that wants a disk to hang has it
    do so.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in ("readers", "write_queue"):
            patch.setattr(f"pyctl.disk.{module}.STALL_SECONDS", 240.0)
        yield
