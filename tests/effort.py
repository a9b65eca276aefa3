"""How much a run tries: `make check` sets PYCTL_QUICK, and property tests try a tenth of their examples."""

from __future__ import annotations

import os

__all__ = ["IS_QUICK", "examples"]

IS_QUICK = bool(os.environ.get("PYCTL_QUICK"))


def examples(n: int) -> int:
    """``n`` examples of a property, in a quick run a tenth of them."""
    return max(n // 10, 5) if IS_QUICK else n
