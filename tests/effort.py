"""The number of examples that a property test tries, and a count of the work that code does.

`make check` sets PYCTL_QUICK, and property tests try a tenth of their examples.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import count

__all__ = ["IS_QUICK", "examples", "work"]

IS_QUICK = bool(os.environ.get("PYCTL_QUICK"))


def examples(n: int) -> int:
    """Return ``n`` examples of a property, in a quick run a tenth of them."""
    return max(n // 10, 5) if IS_QUICK else n


def work(function: Callable[[], object]) -> int:
    """Calls that ``function`` makes, of Python's functions and C's, and their returns.

    The same on every machine, unlike its time. What takes a C function for ever, pytest's time
    limit ends.
    """
    counter = count()
    sys.setprofile(lambda *_: next(counter))
    try:
        function()
    finally:
        sys.setprofile(None)
    return next(counter)
