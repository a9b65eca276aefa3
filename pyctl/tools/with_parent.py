"""Becomes another program, which ends with the process that started it, whatever ended that.

python with_parent.py PROGRAM ARGUMENT...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def _main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"cannot run {sys.argv[1]}: {error.strerror}")


if __name__ == "__main__":
    _main()
