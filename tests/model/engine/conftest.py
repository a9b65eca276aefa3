"""Tests of the engine on models may have a slow disk, never a failing one, as in
tests/unit/engine.
"""

from __future__ import annotations

from tests.unit.engine.conftest import disk_that_is_only_slow

__all__ = ["disk_that_is_only_slow"]
