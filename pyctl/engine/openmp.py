"""The threads of OpenMP, with which llama.cpp evaluates on processors: how long they spin, and
their end.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["SPIN", "SPIN_LEVEL", "end_threads", "limit_spinning", "without_blas_threads"]

SPIN = "GOMP_SPINCOUNT"
SPIN_LEVEL = 50
"""The level of a process without --poll."""

SPIN_PER_LEVEL = 40
"""At level 50 a thread spins for about 0.1 ms: a little slower than longer on an idle machine,
faster on a busy one.
"""

SPIN_OF_LIBGOMP = 300_000

PAUSE_SOFT = 1
"""omp_pause_soft: data of threads stay valid."""

_spin_is_given = SPIN in os.environ or "OMP_WAIT_POLICY" in os.environ


def limit_spinning(level: int = SPIN_LEVEL, *, waits_for_gpu: bool = False) -> None:
    """Set how long OpenMP threads spin (0 to 100), unless the environment does; call it before
    libraries load.
    """
    # Threads that wait for a GPU keep libgomp's milliseconds.
    if not _spin_is_given:
        os.environ[SPIN] = str(SPIN_OF_LIBGOMP if waits_for_gpu else SPIN_PER_LEVEL * level)


BLAS_THREADS = "OPENBLAS_NUM_THREADS"
"""The variable for the threads of numpy's OpenBLAS."""


@contextmanager
def without_blas_threads() -> Iterator[None]:
    """Let a numpy that the block imports compute on its caller's thread, unless the environment
    decides.

    Nothing here multiplies matrices with numpy, while a thread of OpenBLAS spins for 30 ms when it
    starts, on a core that llama.cpp loads with. The variable is unset again: it is not meant for
    programs that this process starts.
    """
    if BLAS_THREADS in os.environ:
        yield
        return
    os.environ[BLAS_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[BLAS_THREADS]


def end_threads() -> None:
    """End the threads that evaluate for the calling thread; its next evaluation starts them
    again.
    """
    # libgomp keeps them for each thread that evaluated. While all are more than the cores, they
    # hardly spin at barriers, which takes up to half of the speed of decoding.
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(PAUSE_SOFT)
