"""Tools outside of the package: random models, a demo, and helpers that tests and benchmarks
share.
"""

from __future__ import annotations
