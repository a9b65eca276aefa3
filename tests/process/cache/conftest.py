"""Stores, as in tests of the disk in one process."""

from __future__ import annotations

from tests.unit.conftest import no_waiting_for_the_disk
from tests.unit.disk.conftest import open_store

__all__ = ["no_waiting_for_the_disk", "open_store"]
