"""A disk in tests of the engine on models is slow at most, as in those without one."""

from __future__ import annotations

from tests.unit.engine.conftest import disk_that_is_only_slow

__all__ = ["disk_that_is_only_slow"]
