"""Measurements: run each script as a module, `python -m bench.disk`."""

from __future__ import annotations
