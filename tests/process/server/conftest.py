"""Fixtures of tests/unit/server for tests with processes."""

from __future__ import annotations

from tests.unit.server.conftest import workers

__all__ = ["workers"]
