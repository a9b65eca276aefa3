"""The training of the built-in model (docs/model.md)."""

from __future__ import annotations
