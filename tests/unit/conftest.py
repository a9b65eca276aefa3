"""Fixtures of all unit tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Skip fsync: processes die in these tests, not machines. Child processes do wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
