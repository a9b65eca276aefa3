"""The versions of what runs here."""

from __future__ import annotations

from importlib.metadata import version

from pyctl import __version__
from pyctl.errors import PyctlError

__all__ = ["print_version"]


def print_version() -> None:
    """Print the releases of pyctl and llama.cpp's bindings, a line for each native module that is missing, and why a
    chosen release is not in use."""
    from pyctl.setup.libraries import libraries_in_use, unused_choice

    built = libraries_in_use()
    release = version("llama_cpp_python") if built is None else built.release
    print(f"pyctl {__version__} (llama-cpp-python {release})")
    try:
        from pyctl.llama.extension import losses
    except (ImportError, PyctlError) as error:
        print(f"llama.cpp's libraries cannot be loaded: {error}")
    else:
        for line in [*losses(), *filter(None, [unused_choice()])]:
            print(line)
