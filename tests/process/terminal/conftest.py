"""Fixtures of tests/unit/terminal for tests with processes."""

from __future__ import annotations

from tests.unit.terminal.conftest import script

__all__ = ["script"]
