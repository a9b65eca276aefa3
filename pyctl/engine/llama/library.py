"""The library: loads llama.cpp and the extension, sends its log to ours, hands out memory that copies fast."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as api
from llama_cpp import llama_cpp as bindings

from pyctl.cache.snapshot import Block
from pyctl.errors import LibraryMismatchError

__all__ = [
    "HostBuffer",
    "KVState",
    "allocate",
    "build_version",
    "captured_log",
    "last_log_error",
    "library_versions",
    "redirect_log",
    "reserve_pinned",
]

REMEDY = (
    "reinstall both: pip install --force-reinstall --no-cache-dir llama-cpp-python=={wanted}, "
    "then pip install --force-reinstall --no-deps pyctl"
)

LIBRARIES = {"llama.cpp": ("libllama.so", "llama_version"), "ggml": ("libggml-base.so", "ggml_version")}


def library_versions() -> dict[str, str]:
    """Versions of what is loaded: the bindings, libllama and libggml."""
    versions = {"llama-cpp-python": llama_cpp.__version__}
    for name, (library, symbol) in LIBRARIES.items():
        function = getattr(_library(library), symbol)
        function.restype = ctypes.c_char_p
        versions[name] = function().decode().removesuffix("-dev")
    return versions


def build_version() -> str:
    """One line that names the llama.cpp in the process, such as ``llama.cpp 0.5.0 (ggml 0.25.3)``."""
    versions = library_versions()
    return (
        f"llama.cpp {versions['llama.cpp']} (ggml {versions['ggml']}, llama-cpp-python {versions['llama-cpp-python']})"
    )


def _library(name: str) -> ctypes.CDLL:
    # The extension is not linked to the library: its symbols are found because this load makes them global.
    return ctypes.CDLL(str(Path(str(bindings._base_path)) / name), mode=ctypes.RTLD_GLOBAL)


def check(built: dict[str, str], loaded: dict[str, str]) -> None:
    """Compare the versions the extension was built for with those that are loaded.

    Raises LibraryMismatchError that names both and what to reinstall.
    """
    for name, wanted in built.items():
        if loaded[name] != wanted:
            raise LibraryMismatchError(
                f"pyctl's extension was built for {name} {wanted}, but {name} {loaded[name]} is loaded; "
                + REMEDY.format(wanted=built["llama-cpp-python"])
            )


_loaded = library_versions()

try:
    from pyctl import _core
except ImportError as error:
    raise LibraryMismatchError(
        f"pyctl's compiled extension cannot be loaded ({error}) beside {_loaded}; " + REMEDY.format(wanted="0.3.36")
    ) from error

check(
    {"llama-cpp-python": _core.BINDINGS_VERSION, "llama.cpp": _core.LLAMA_VERSION, "ggml": _core.GGML_VERSION},
    _loaded,
)

HostBuffer = _core.HostBuffer

KVState = _core.KVState

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


def redirect_log() -> None:
    """Send everything llama.cpp says to the logger ``llama.cpp``, one level quieter than it thinks it is."""
    api.llama_log_set(_receive, ctypes.c_void_p(0))


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """The lines that llama.cpp says within the block, which go nowhere else. Not for two threads at once."""
    global _captured
    lines: list[str] = []
    _captured = lines
    try:
        yield lines
    finally:
        _captured = None


def last_log_error(default: str) -> str:
    """What llama.cpp complained about most recently, forgotten afterwards."""
    text = FUNCTION.sub("", _errors[0]) if _errors else default
    _errors.clear()
    return text


SLACK = 2**30

"""What is ready or on its way to disk beside what the cache counts."""

AHEAD = 3 * 2**28

"""Bytes kept ready for the next snapshots: rows of a long stretch and some states."""


def reserve_pinned(budget: int | None, initial: int = 0) -> bool:
    """Make pinned memory ready, in the background, for a cache of ``budget`` bytes; None for half of the machine's.

    ``initial`` bytes of it, at most half, are made ready once, for what a restart loads. Memory that was pinned is used
    again and not returned. False, and plain memory from then on, where no loaded device library can pin any.
    """
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    if budget is not None:
        limit = min(limit, budget + SLACK)
    if budget == 0 or not HostBuffer.open(limit, min(AHEAD, limit // 4)):
        return False
    HostBuffer.reserve(min(initial, limit // 2))
    atexit.register(HostBuffer.stop)
    return True


def allocate(size: int, *, pinned: bool = True) -> Block:
    """A block of ``size`` bytes, uninitialised; pinned if there is room. MemoryError without memory. Any thread."""
    return np.frombuffer(memoryview(HostBuffer(size, pinned)), np.uint8) if size else np.empty(0, np.uint8)
