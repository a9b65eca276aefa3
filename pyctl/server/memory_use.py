"""What this process takes of the machine's memory."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

__all__ = ["resident_bytes"]


def resident_bytes() -> int:
    """Bytes of this process that are in memory now; where the system does not tell, the most there ever were."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
