"""What is not in the package but makes or shows it: random models, the training of the built-in one, a demo, and what
tests and benchmarks have in common."""

from __future__ import annotations
