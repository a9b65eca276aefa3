"""pyctl: a llama.cpp server and chat with an exact prefix cache for hybrid models."""

from __future__ import annotations

__all__ = ["__version__", "version_line"]

__version__ = "0.2.0"


def version_line() -> str:
    """Name and release of pyctl and of llama.cpp's bindings."""
    from importlib.metadata import version

    return f"pyctl {__version__} (llama-cpp-python {version('llama_cpp_python')})"
