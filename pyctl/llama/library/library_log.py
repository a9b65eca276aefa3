"""llama.cpp's log: messages for Python's logging, and the errors that explain failed calls."""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pyctl.llama.library.bindings import api

__all__ = [
    "LibraryLog",
    "captured_log",
    "forget_log_errors",
    "last_log_error",
    "log",
    "log_callback",
    "redirect_log",
]

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
