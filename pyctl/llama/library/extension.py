"""The native modules, imported once, after llama.cpp's libraries: each a module, or None with a
reason in ``missing``.

They are not linked to the libraries and resolve their symbols through global visibility. A module
that does not fit the loaded library switches its features off; `pyctl.llama.library.floor` has
plain forms of those that a server needs. No other module imports them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from pyctl.errors import LibraryMismatchError
from pyctl.llama.library.bindings import VERSION, api
from pyctl.llama.library.module_trial import try_modules
from pyctl.machine.environment import TRIAL, USE_EXTENSION
from pyctl.machine.libraries import MODULES
from pyctl.settings.convert import FALSE_WORDS

__all__ = [
    "build_line",
    "build_version",
    "check_versions",
    "core",
    "describe_missing",
    "drafts",
    "library_file",
    "library_versions",
    "missing",
    "open_library",
    "pool",
    "unfit",
    "with_trailing_space",
]

LIBRARIES = {
    "llama.cpp": ("libllama.so", "llama_version"),
    "ggml": ("libggml-base.so", "ggml_version"),
}

LOST = {
    "core": (
        "one request at a time, whole sequences are saved, and no images, pinned memory, "
        "--kv-pool or draft models"
    ),
    "drafts": "no draft models but separate ones (draft-simple)",
    "pool": "no --kv-pool",
}
"""The features that are missing without each module."""

missing: dict[str, str] = {}
"""Why a module of `LOST` is None, by its name."""

unfit: dict[str, str] = {}
"""Why `core` does not move rows and states of a class of memory, by its name; such memories are
saved whole.
"""


def library_file(name: str) -> Path:
    """Return the path of a shared library of llama-cpp-python, which may not exist."""
    return Path(str(api._base_path)) / name


def open_library(name: str) -> ctypes.CDLL:
    """Load a shared library of llama-cpp-python with global symbols."""
    return ctypes.CDLL(str(library_file(name)), mode=ctypes.RTLD_GLOBAL)


def library_versions() -> dict[str, str]:
    """Return the loaded versions of the bindings, libllama and libggml, which older releases
    lack.
    """
    versions = {"llama-cpp-python": VERSION}
    for name, (library, symbol) in LIBRARIES.items():
        function = getattr(open_library(library), symbol, None)
        if function is None:
            versions[name] = "unknown"
            continue
        function.restype = ctypes.c_char_p
        versions[name] = function().decode().removesuffix("-dev")
    return versions


def build_version() -> str:
    """Return the versions as one line, such as ``llama.cpp 0.5.0 (ggml 0.25.3, llama-cpp-python
    0.3.1)``.
    """
    versions = library_versions()
    return (
        f"llama.cpp {versions['llama.cpp']} (ggml {versions['ggml']}, llama-cpp-python "
        f"{versions['llama-cpp-python']})"
    )


def build_line() -> str:
    """Return `build_version` and `describe_missing`."""
    return "; ".join([build_version(), *describe_missing()])


def check_versions(built: dict[str, str], loaded: dict[str, str]) -> None:
    """Compare the extension's build versions with the loaded ones. Raises LibraryMismatchError if
    they differ.
    """
    for name, wanted in built.items():
        if loaded[name] != (wanted or "unknown"):  # older sources do not state their version either
            raise LibraryMismatchError(
                f"it was built for {name} {wanted}, but {name} {loaded[name]} is loaded"
            )


def describe_missing() -> Iterator[str]:
    """Yield a line for each module that is missing."""
    for name in ["core"] if core is None else missing:
        title = "the extension" if name == "core" else f"the extension's {name}"
        yield f"without {title} ({missing[name]}): {LOST[name]}"
    if core is not None and unfit:
        reasons = "; ".join(dict.fromkeys(unfit.values()))
        lost = "whole sequences are saved, and no images, --kv-pool or draft models"
        yield f"without rows of {', '.join(unfit)} ({reasons}): {lost}"


MORE_BYTES = 256


def with_trailing_space(bindings: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """Return the struct ``bindings`` with room for fields that a later library has at its end.

    Such structs are returned and passed by value: a longer one would be written and read past what
    the bindings have.
    """
    return type(
        bindings.__name__, (bindings,), {"_fields_": [("more", ctypes.c_uint8 * MORE_BYTES)]}
    )


def _check_params() -> None:
    """Raise LibraryMismatchError if known defaults of the library are not where the bindings have
    them.
    """
    model = api.llama_model_default_params()
    context = api.llama_context_default_params()
    found = [
        model.split_mode,
        model.vocab_only,
        model.use_extra_bufts,
        context.type_k,
        context.type_v,
    ]
    found += [context.embeddings, context.offload_kqv, context.op_offload]
    if found != [
        api.LLAMA_SPLIT_MODE_LAYER,
        False,
        True,
        api.GGML_TYPE_F16,
        api.GGML_TYPE_F16,
        False,
        True,
        True,
    ]:
        raise LibraryMismatchError(
            f"llama-cpp-python {VERSION} was made for another llama.cpp than the "
            "one in "
            f"{library_file('libllama.so').parent}; reinstall pyctl (docs/install.md)"
        )


def _import_core(loaded: dict[str, str]) -> ModuleType:
    """Return `_core`, whose import checks symbols, sizes and limits. Raises ImportError or
    LibraryMismatchError.
    """
    if os.environ.get(USE_EXTENSION, "").lower() in FALSE_WORDS:
        raise ImportError("--no-extension")
    spec = find_spec("pyctl._core")
    if spec is not None and spec.origin is not None and not _tried:
        _found.update(try_modules(Path(spec.origin)))
        unfit.update((name, reason) for name, reason in _found.items() if name not in MODULES)
    module = _import("core")
    built = {"llama-cpp-python": module.BINDINGS_VERSION, "llama.cpp": module.LLAMA_VERSION}
    check_versions({**built, "ggml": module.GGML_VERSION}, loaded)
    return module


def _import(name: str) -> ModuleType:
    """Return a module that passed its trial. Raises ImportError."""
    if reason := _found.get(f"_{name}"):
        raise ImportError(reason)
    return import_module(f"pyctl._{name}")


def _record_missing(error: Exception, *names: str) -> None:
    """Note why modules are missing; a process that tries one of them ends."""
    reason = " ".join(str(error.__cause__ or error).split())
    if _tried in names:
        raise SystemExit(reason)
    missing.update(dict.fromkeys(names, reason))


def _import_other(name: str) -> ModuleType | None:
    """Return the module ``name``, which is linked to `_core`; None if it is missing, or another one
    is tried.
    """
    if core is None or _tried not in ("", name):
        return None
    try:
        return _import(name)
    except ImportError as error:
        _record_missing(error, name)
        return None


_tried = Path(os.environ.get(TRIAL, "")).name.partition(".")[0].removeprefix("_")
_found: dict[str, str] = {}  # the reason against each native module, empty for those that fit
_loaded = library_versions()
api.llama_model_default_params.restype = with_trailing_space(api.llama_model_params)
api.llama_context_default_params.restype = with_trailing_space(api.llama_context_params)
_check_params()
core: ModuleType | None = None
try:
    core = _import_core(_loaded)
except (ImportError, LibraryMismatchError) as error:
    _record_missing(error, *LOST)
drafts = _import_other("drafts")
pool = _import_other("pool")
