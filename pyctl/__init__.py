"""pyctl: a llama.cpp server and chat with an exact prefix cache for hybrid models."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.3.0"
