"""The versions of pyctl, llama.cpp and their libraries."""

from __future__ import annotations

from pyctl import __version__
from pyctl.errors import PyctlError

__all__ = ["print_version"]


def print_version() -> None:
    """Print the releases of pyctl and llama.cpp's bindings, a line for each native module that is
    missing, and why a chosen release is not in use.
    """
    from pyctl.machine.libraries import unused_choice

    try:
        from pyctl.llama.library.extension import describe_missing, library_versions

        release = library_versions()["llama-cpp-python"]
        lines = [*describe_missing(), *filter(None, [unused_choice()])]
    except (ImportError, PyctlError) as error:
        release = "none"
        lines = [f"llama.cpp's libraries cannot be loaded: {error}"]
    print("\n".join([f"pyctl {__version__} (llama-cpp-python {release})", *lines]))
