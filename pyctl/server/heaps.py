"""The heaps of the C library: how many there are, and when what was freed goes back to the system."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping

from pyctl.limit import limit

__all__ = ["give_back", "share_heaps"]

_MOST_HEAPS = limit(2, "heaps of the C library (glibc)", "threads share them", "process")
_ARENA_MAX = -8
"""M_ARENA_MAX of malloc.h."""


def share_heaps(environ: Mapping[str, str] = os.environ) -> bool:
    """Let all threads of this process share few heaps; call it before there are any.

    glibc gives each thread a heap of its own, up to eight for each core. Each keeps what its costliest request took, so
    a process would grow for as long as such requests come by threads that had none before. False, and nothing changed,
    where the C library is another, or ``environ`` says how many.
    """
    is_said = "MALLOC_ARENA_MAX" in environ or "glibc.malloc.arena_max" in environ.get("GLIBC_TUNABLES", "")
    return not is_said and bool(_of_glibc("mallopt", _ARENA_MAX, _MOST_HEAPS))


def give_back() -> bool:
    """Give pages that hold nothing any more back to the system: what a large request took and freed lies between what
    it left. Takes some milliseconds, in which threads may wait for memory. Whether there were any.
    """
    return bool(_of_glibc("malloc_trim", 0))


def _of_glibc(name: str, *numbers: int) -> int:
    """What its function returns; 0 where the C library is another."""
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    return function(*numbers) if function is not None else 0
