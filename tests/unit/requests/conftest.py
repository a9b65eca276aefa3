"""Fixtures of the server's tests, which tests of requests need as well."""

from __future__ import annotations

from tests.unit.server.conftest import workers

__all__ = ["workers"]
