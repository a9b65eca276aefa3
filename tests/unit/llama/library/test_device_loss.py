"""An abort of ggml ends the process with exit code 1, and the log has the reason."""

from __future__ import annotations

import subprocess
import sys

import pytest

ABORT = """
import ctypes, logging, sys
from pyctl.llama.library import device_loss, extension, library_log
logging.basicConfig(format="%(message)s")
device_loss.SAVING_SECONDS = 0.0
device_loss.loss.workers = "a:1"
device_loss.loss.is_watched = "watched" in sys.argv
if "logged" in sys.argv:
    library_log.log_callback(library_log.ERROR, b"CUDA error: out of memory", None)
device_loss.when_aborted(device_loss.shut_down_lost_device)
ctypes.CDLL(None).ggml_abort(sys.argv[1].encode(), 7, b"it failed")
print("unreachable")
"""


def abort(file: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a process that ggml aborts in ``file``."""
    command = [sys.executable, "-c", ABORT, file, *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("file", "flags", "reason"),
    [
        ("ggml-rpc.cpp", (), "the worker a:1 is lost"),
        ("ggml-cuda.cu", (), "llama.cpp has failed: ggml-cuda.cu:7: it failed"),
        ("ggml-cuda.cu", ("logged",), "llama.cpp has failed: CUDA error: out of memory"),
    ],
)
def test_the_log_has_the_reason(file: str, flags: tuple[str, ...], reason: str) -> None:
    done = abort(file, "watched", *flags)
    assert done.stderr.splitlines()[-1] == f"the program ends: {reason}"
    assert done.stdout == ""
    assert done.returncode == 1


def test_an_abort_that_nothing_watches_shows_its_message() -> None:
    done = abort("ggml-cuda.cu")
    assert "ggml-cuda.cu:7: it failed" in done.stderr.splitlines()[1]
    assert done.returncode == 1
