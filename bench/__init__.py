"""Measurements: run each script as a module, `python -m bench.kv`."""

from __future__ import annotations
