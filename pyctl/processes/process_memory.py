"""Memory of this process: the heaps of the C library, pages that go back to the system, and
resident bytes.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pyctl.settings.limit import limit

__all__ = ["collect_all", "resident_bytes", "share_heaps", "trim_heap"]

_MAX_HEAPS = limit(2, "heaps of the C library (glibc)", "threads share them", "process")
_ARENA_MAX = -8
"""M_ARENA_MAX of malloc.h."""


def share_heaps(environ: Mapping[str, str] = os.environ) -> bool:
    """Let all threads share few heaps; call it before threads start. Return False if ``environ``
    decides, or without glibc.
    """
    # A heap keeps the memory of its largest request, and glibc has up to eight heaps for each core.
    is_said = "MALLOC_ARENA_MAX" in environ or "glibc.malloc.arena_max" in environ.get(
        "GLIBC_TUNABLES", ""
    )
    return not is_said and bool(_of_glibc("mallopt", _ARENA_MAX, _MAX_HEAPS))


def trim_heap() -> bool:
    """Return free pages to the system; whether there were any. Takes milliseconds, in which threads
    may wait.
    """
    return bool(_of_glibc("malloc_trim", 0))


def collect_all() -> None:
    """Free objects without references, also a model's, which automatic collections skip."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim_heap()


def _of_glibc(name: str, *numbers: int) -> int:
    """Call a function of glibc; return 0 where the C library is another."""
    function: Callable[..., int] | None = (
        getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    )
    return function(*numbers) if function is not None else 0


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory now, with freed ones that its heaps keep;
    where the system does not report them, their peak.
    """
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    except (OSError, ValueError, IndexError):
        maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return maximum if sys.platform == "darwin" else maximum * 1024
