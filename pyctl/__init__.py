"""pyctl: a llama.cpp server and chat whose prefix cache outlives edits and restarts, also for
hybrid models.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.3.0"
