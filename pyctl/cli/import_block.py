"""Imports without collections of garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collections"]


@contextmanager
def without_collections() -> Iterator[None]:
    """Let a block of imports run without the collector, which then leaves their objects alone for
    good: they stay, so it need not look at them, now or later.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
