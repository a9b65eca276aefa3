"""The extension or what takes its place, llama.cpp's log, and pinned memory; both are per process
and thread-safe.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np

from pyctl.cache.snapshot import Block
from pyctl.errors import (
    EngineError,
    OutOfCellsError,
    PreemptedError,
    StateError,
    UnavailableError,
)
from pyctl.llama.library import extension, floor
from pyctl.llama.library.bindings import api
from pyctl.llama.library.extension import build_version, library_file, open_library, unfit
from pyctl.settings.limit import limit

__all__ = [
    "EvaluationControl",
    "HiddenRows",
    "HostBuffer",
    "KVState",
    "LibraryLog",
    "NextnHead",
    "Pulse",
    "RowStore",
    "allocate",
    "api",
    "build_version",
    "captured_log",
    "checked",
    "forget_log_errors",
    "last_log_error",
    "library_file",
    "log_callback",
    "lose",
    "loss",
    "open_library",
    "redirect_log",
    "reserve_pinned",
    "unfit",
    "when_aborted",
]

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    from pyctl._core import HostBuffer, KVState, OutOfCells, Pulse
    from pyctl._drafts import HiddenRows, NextnHead
    from pyctl._pool import RowStore
else:
    KVState = (extension.core or floor).KVState
    HostBuffer = (extension.core or floor).HostBuffer
    Pulse = (extension.core or floor).Pulse
    OutOfCells = (extension.core or floor).OutOfCells
    # Without the module of these, nothing comes to where they are used.
    HiddenRows, NextnHead = (
        getattr(extension.drafts, name, None) for name in ("HiddenRows", "NextnHead")
    )
    RowStore = getattr(extension.pool, "RowStore", None)

# -- llama.cpp's log
# ----------------------------------------------------------------------------------

LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.WARNING}
ERROR = 4
CONTINUED = 5
"""ggml_log_level: none, debug, info, warn, error, and "continue the last line"."""

FUNCTION = re.compile(r"^(\w+: )+")
"""Prefix of llama.cpp's messages: names of functions."""

log = logging.getLogger("llama.cpp")


class LibraryLog:
    """The receiver of llama.cpp's messages, for the logger ``llama.cpp`` or for a capture.
    Thread-safe.

    llama.cpp calls back on the thread that called it, so captures and errors belong to the calling
    thread: a message from one model's engine is never taken for one from the load of another.
    """

    def __init__(self) -> None:
        self._threads = threading.local()
        self.callback = api.llama_log_callback(lambda level, text, _: self.receive(level, text))

    def redirect(self) -> None:
        """Receive all messages of llama.cpp from now on and log them one level lower."""
        api.llama_log_set(self.callback, ctypes.c_void_p(0))

    def receive(self, level: int, text: bytes) -> None:
        """Process one message of llama.cpp, or a continuation of the last one."""
        line = text.decode("utf-8", "replace").strip()
        mine = self._threads
        if level != CONTINUED:
            mine.level = LEVELS.get(level, logging.DEBUG)
        if not line:
            return
        if level == ERROR and not getattr(mine, "error", ""):
            mine.error = line
        captured: list[str] | None = getattr(mine, "captured", None)
        if captured is not None:
            captured.append(line)
        else:
            log.log(getattr(mine, "level", logging.DEBUG), "%s", line)

    @contextmanager
    def captured(self) -> Iterator[list[str]]:
        """Yield a list of the lines that this thread causes within the block, which are not
        logged.
        """
        lines: list[str] = []
        before = getattr(self._threads, "captured", None)
        self._threads.captured = lines
        try:
            yield lines
        finally:
            self._threads.captured = before

    def forget_errors(self) -> None:
        """Drop earlier errors of this thread, so that `last_error` reports only later ones."""
        self._threads.error = ""

    def last_error(self, default: str) -> str:
        """Return this thread's first error since the last call or `forget_errors`, the cause of
        later ones; or ``default``.
        """
        error: str = getattr(self._threads, "error", "")
        self._threads.error = ""
        return FUNCTION.sub("", "; ".join(error.splitlines())) if error else default


_library_log = LibraryLog()

redirect_log = _library_log.redirect
captured_log = _library_log.captured
forget_log_errors = _library_log.forget_errors
last_log_error = _library_log.last_error
log_callback = _library_log.callback

# -- aborts
# ----------------------------------------------------------------------------------

RPC_SOURCE = b"ggml-rpc"
"""Part of the message of an abort that a lost worker causes."""

SAVING_SECONDS = limit(
    30.0,
    "writing the cache after a device was lost",
    "the process exits; unwritten snapshots are lost",
    "process",
    "s",
)


@dataclass
class Loss:
    """The loss of a device.

    Attributes:
        text: The text for the log, "" while all devices are there.
        is_watched: Whether a thread watches for it.
        workers: The names of the workers of --rpc.
    """

    text: str = ""
    is_watched: bool = False
    workers: str = ""


loss = Loss()
"""One for the process, since ggml's devices are global."""

_abort_callback = cache(
    ctypes.CFUNCTYPE(None, ctypes.c_char_p)
)  # ggml may call it until the process ends


def when_aborted(function: Callable[[bytes], None]) -> None:
    """Have ``function`` called with the message on the thread on which ggml is about to abort the
    process.
    """
    ctypes.CDLL(None).ggml_set_abort_callback(
        _abort_callback(function)
    )  # of the library that libllama uses


def lose(message: bytes) -> None:
    """End the process after an abort, with the cache written: a worker is lost, or a GPU has no
    memory left.

    The thread of the failed call waits here while others write. While nothing is served there is
    nothing to write.
    """
    text = message.decode("utf-8", "replace")
    is_worker = RPC_SOURCE in message
    loss.text = (
        f"the worker {loss.workers} is lost"
        if is_worker
        else f"llama.cpp has failed: {last_log_error(text)}"
    )
    logging.getLogger("pyctl").critical("the program ends: %s", loss.text)
    if loss.is_watched:
        time.sleep(SAVING_SECONDS)
    elif not is_worker:
        print(text, file=sys.stderr, flush=True)
        ctypes.CDLL(None).ggml_print_backtrace()
    logging.shutdown()
    os._exit(1)


# -- ending evaluations early
# ----------------------------------------------------------------------------------

ABORTED = 2
"""llama_decode's result when `Pulse` stops it."""

MIN_LOOKS = 32
"""Least checks per evaluation for preemption: with fewer, a GPU runs almost all of it without one.
"""


class EvaluationControl:
    """The `Control` of evaluations with ``pulse`` attached."""

    def __init__(self) -> None:
        self.pulse = Pulse()
        self._is_allowed = False
        self._n_looks = 0  # checks of the last evaluation

    def run(self, evaluate: Callable[[], int]) -> None:
        """Run ``evaluate`` and raise the error for its llama_decode code: UnavailableError,
        PreemptedError, OutOfCellsError or EngineError.
        """
        before = self.pulse.count
        forget_log_errors()
        if not self._is_allowed:
            code = evaluate()
        else:
            with captured_log() as lines:
                code = evaluate()
            for line in lines if code != ABORTED else ():  # an abort is no failure
                log.log(logging.WARNING if code else logging.DEBUG, "%s", line)
        if code == 0:
            self._n_looks = self.pulse.count - before
        elif code == ABORTED:
            stopped = UnavailableError("the evaluation was stopped")
            preempted = PreemptedError("preempted")
            raise stopped if self.pulse.is_stopped else preempted
        elif code == 1:
            raise OutOfCellsError
        else:
            raise EngineError(
                f"evaluation failed: {last_log_error(f'llama_decode returned {code}')}"
            )

    def interrupt(self) -> None:
        self.pulse.stop()

    @property
    def can_preempt(self) -> bool:
        return self._n_looks >= MIN_LOOKS or self.pulse.is_watching

    def allow(self, is_so: bool) -> None:
        self._is_allowed = is_so
        self.pulse.allow(is_so)

    def preempt(self, is_wanted: bool = True) -> None:
        self.pulse.ask(is_wanted)

    @property
    def lost(self) -> str:
        """The lost device, after which its calls may not return; "" while all are there."""
        return loss.text

    @property
    def heartbeat(self) -> int:
        loss.is_watched = True
        if loss.text:
            raise EngineError(loss.text)
        return self.pulse.count


# -- pinned memory
# ----------------------------------------------------------------------------------

SLACK = limit(
    3 * 2**28,
    "memory for snapshots beyond --cache-ram, on a GPU: ready for the next, being copied, or on "
    "the way to disk",
    "snapshots lie in memory that is copied slower",
    "memory",
    "bytes",
)

AHEAD = 3 * 2**28
"""Bytes pinned ahead for the next snapshots: rows of a long message and some states."""


def reserve_pinned(budget: int | None, initial: int = 0, pending: int = 0) -> bool:
    """Pin memory in the background for a cache of ``budget`` bytes; None for half of the machine's
    memory.

    ``initial`` bytes, at most half, are pinned first, for snapshots loaded at a restart. More is
    pinned when snapshots need it, ``pending`` bytes of it for disk writes, and then reused. False
    if no loaded device library can pin memory; blocks are then pageable.
    """
    if budget == 0:
        return False
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for_cache = half if budget is None else min(half, budget + SLACK)
    maximum = min(half, for_cache + pending)
    ahead = min(AHEAD, maximum // 4)
    if not HostBuffer.open(maximum, ahead, min(initial, for_cache // 2)):
        return False
    atexit.register(HostBuffer.stop)
    return True


def allocate(size: int, *, pinned: bool = True) -> Block:
    """Return an uninitialised block of ``size`` bytes, pinned if there is room. Raises MemoryError.
    Thread-safe.
    """
    return (
        np.frombuffer(memoryview(HostBuffer(size, pinned)), np.uint8)
        if size
        else np.empty(0, np.uint8)
    )


def checked(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the extension; convert its errors to StateError or OutOfCellsError."""
    try:
        return function(*args, **kwargs)
    except OutOfCells as error:
        raise OutOfCellsError from error
    except (ValueError, RuntimeError) as error:
        raise StateError(str(error)) from error
