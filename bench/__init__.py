"""Measurements: run each script as a module, `python -m bench.ttft`."""

from __future__ import annotations
