"""Tools outside of the package: random models, the training of the built-in one, a demo, and helpers that tests and
benchmarks share."""

from __future__ import annotations
