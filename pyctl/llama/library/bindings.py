"""The modules of llama-cpp-python, imported after the package has prepared this process. No other
module imports them.
"""

from __future__ import annotations

from pyctl.errors import LibraryMismatchError

try:
    import llama_cpp
    from llama_cpp import llama_cpp as api
    from llama_cpp import llama_cpp_ext as ext
    from llama_cpp import mtmd_cpp as mtmd
except (
    AttributeError,
    OSError,
    RuntimeError,
) as error:  # a function that the library lacks, or no library
    raise LibraryMismatchError(
        f"llama-cpp-python does not fit llama.cpp's libraries: {error}"
    ) from error

__all__ = ["api", "ext", "llama_cpp", "mtmd"]
