"""llama.cpp's log, sent to Python's; the last error is kept for the message of a failed load."""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from llama_cpp import llama_cpp as api

__all__ = ["captured", "last_error", "redirect"]

log = logging.getLogger("llama.cpp")

# ggml_log_level: none, debug, info, warn, error, and "continue the last line".
LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.WARNING}
ERROR, CONTINUED = 4, 5

FUNCTION = re.compile(r"^(\w+: )+")
"""Names of functions that llama.cpp puts before its messages."""

_errors: list[str] = []
_captured: list[str] | None = None
_level = logging.DEBUG


@api.llama_log_callback  # type: ignore[untyped-decorator]
def _receive(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    global _level
    line = text.decode("utf-8", "replace").strip()
    if level != CONTINUED:
        _level = LEVELS.get(level, logging.DEBUG)
    if not line:
        return
    if level == ERROR:
        _errors.append(line)
    if _captured is None:
        log.log(_level, "%s", line)
    else:
        _captured.append(line)


def redirect() -> None:
    """Send everything llama.cpp says to the logger ``llama.cpp``, one level quieter than it thinks it is."""
    api.llama_log_set(_receive, ctypes.c_void_p(0))


@contextmanager
def captured() -> Iterator[list[str]]:
    """The lines that llama.cpp says within the block, which go nowhere else. Not for two threads at once."""
    global _captured
    lines: list[str] = []
    _captured = lines
    try:
        yield lines
    finally:
        _captured = None


def last_error(default: str) -> str:
    """What llama.cpp complained about most recently, forgotten afterwards."""
    text = FUNCTION.sub("", _errors[0]) if _errors else default
    _errors.clear()
    return text
