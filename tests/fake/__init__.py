"""A backend without a model, for tests."""

from __future__ import annotations

from tests.fake.fake_backend import FakeBackend

__all__ = ["FakeBackend"]
