"""The modules of llama-cpp-python, imported after the package has prepared this process. No other
module imports them.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

from pyctl.errors import LibraryMismatchError


class _DeferredPackage(ModuleType):
    """A package whose own code runs at the first use of a name that none of its modules has set."""

    def __getattr__(self, name: str) -> object:
        ModuleType.__setattr__(self, "__class__", ModuleType)
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _defer(name: str) -> None:
    """Make the package ``name`` importable without running its own code, if it was not imported.

    llama-cpp-python's imports its server's whole API, with jinja2, a disk cache and
    multiprocessing: 45 ms and 6 MB at each start, for names that nothing here uses.
    """
    spec = find_spec(name) if name not in sys.modules else None
    if spec is not None:
        package = module_from_spec(spec)
        package.__class__ = _DeferredPackage
        sys.modules[name] = package


def _read_version(package: str) -> str:
    """Return the version that the source of ``package`` has; "unknown" without one.

    Its attribute would run the package, and the metadata of the installation take 12 ms.
    """
    source = Path(str(sys.modules[package].__file__)).read_text("utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE)
    return found[1] if found is not None else "unknown"


try:
    _defer("llama_cpp")
    import llama_cpp.llama_cpp as api
    import llama_cpp.llama_cpp_ext as ext
    import llama_cpp.mtmd_cpp as mtmd
except (
    AttributeError,
    OSError,
    RuntimeError,
) as error:  # a function that the library lacks, or no library
    raise LibraryMismatchError(
        f"llama-cpp-python does not fit llama.cpp's libraries: {error}"
    ) from error

VERSION = _read_version("llama_cpp")
"""The version of llama-cpp-python."""

__all__ = ["VERSION", "api", "ext", "mtmd"]
