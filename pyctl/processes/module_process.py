"""Child processes: those that run a module of this package, for work with a limit on time or
memory, and their end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess

from pyctl.processes.child_environment import child_environment
from pyctl.processes.module_command import module_command

__all__ = ["answer_of_module", "end_with_parent", "start_module"]

_PR_SET_PDEATHSIG = 1


def start_module(name: str) -> subprocess.Popen[bytes]:
    """Start the module ``name`` in its own session, with pipes for its input and its output."""
    return subprocess.Popen(
        module_command(name),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=child_environment(),
        start_new_session=True,
    )


def answer_of_module(name: str, data: bytes, seconds: float) -> bytes:
    """Return the output of the module for ``data``. Raises TimeoutExpired after ``seconds``, when
    it is killed with its children.
    """
    with start_module(name) as process:
        try:
            output, _ = process.communicate(data, seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return output


def end_with_parent(number: signal.Signals) -> None:
    """Have this process get the signal ``number`` when its parent ends, however that ends; a
    ``preexec_fn``.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
