"""Loads llama.cpp and the extension together, and refuses to run when they are not of one release."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
from llama_cpp import llama_cpp as bindings

from pyctl.errors import LibraryMismatchError

__all__ = ["HostBuffer", "KVState", "build_version", "library_versions"]

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
