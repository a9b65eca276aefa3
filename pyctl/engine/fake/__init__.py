"""A backend without a model, for tests."""

from __future__ import annotations

from pyctl.engine.fake.fake_backend import FakeBackend

__all__ = ["FakeBackend"]
