"""Runs a program between this process's input and output, and ends with it all that it started,
also in other sessions.

python keeper.py LIMIT PROGRAM ARGUMENT...

It ends when the program does, when its input or its parent ends, at SIGTERM, and at a line of
output with more than LIMIT bytes, which its reader would have to hold. Needs no package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_GRACE_SECONDS = 1.0
"""The time for a program to end by itself when its input or its output has ended."""

_KILL_SECONDS = 5.0
"""The time until processes are left that cannot be killed, such as another user's."""

_OUTPUT_SECONDS = 0.2
"""The time for the last output of a program that has ended: a process that it left running may hold
the pipe for ever.
"""


def _descendants() -> list[int]:
    """Return the processes that descend from this one, except those that have ended."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
    descendants = list[int]()
    waiting = [os.getpid()]
    while waiting:
        below = children.pop(waiting.pop(), [])
        descendants += below
        waiting += below
    return descendants


def _end(number: int = 0, frame: object = None) -> NoReturn:
    """Kill all descendants, and exit. Those whose parent is gone become children of this process:
    none gets lost.
    """
    end = time.monotonic() + _KILL_SECONDS
    with suppress(ChildProcessError):  # none is left
        while time.monotonic() < end:
            for pid in _descendants():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.005)
    os._exit(0)


def _end_soon(number: int, frame: object) -> None:
    time.sleep(_GRACE_SECONDS)
    _end()


def _pass_on(source: int, sink: int, maximum: int) -> None:
    """Copy until ``source`` ends or one of its lines has more than ``maximum`` bytes; soon after,
    everything ends.
    """
    size = 0
    with suppress(OSError):
        while size <= maximum and (data := os.read(source, 1 << 16)):
            size = size + len(data) if b"\n" not in data else len(data) - data.rindex(b"\n")
            view = memoryview(data)
            while view:
                view = view[os.write(sink, view) :]
    os.close(sink)
    time.sleep(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _main() -> None:
    """Run the program and pass its input and output on until it ends; then end all its descendants.

    The order matters: this process adopts orphans and handles signals before the program starts, so
    that nothing that it starts can escape.
    """
    maximum = int(sys.argv[1])
    command = sys.argv[2:]
    system = ctypes.CDLL(None)
    system.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end_soon)
    system.prctl(
        _PR_SET_PDEATHSIG, signal.SIGHUP
    )  # a program that reads nothing would hide the end of the input
    try:
        program = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=lambda: system.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # with this process
        )
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")
    assert program.stdin is not None
    assert program.stdout is not None
    pipes = ((0, program.stdin.fileno(), sys.maxsize), (program.stdout.fileno(), 1, maximum))
    reading, writing = (
        threading.Thread(target=_pass_on, args=pipe, name="pyctl-pipe", daemon=True)
        for pipe in pipes
    )
    reading.start()
    writing.start()
    while os.wait()[0] != program.pid:
        pass
    writing.join(_OUTPUT_SECONDS)
    _end()


if __name__ == "__main__":
    _main()
