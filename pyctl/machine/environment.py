"""Environment variables that choose llama.cpp's libraries and pyctl's extension for a process."""

from __future__ import annotations

__all__ = ["CHOICE", "LIBRARY_PATH", "MTMD_PATH", "PACKAGE", "TRIAL", "USE_EXTENSION"]

LIBRARY_PATH = "LLAMA_CPP_LIB_PATH"
MTMD_PATH = "MTMD_CPP_LIB"
"""Variables by which llama-cpp-python finds libllama and libmtmd."""

CHOICE = "PYCTL_LIBS"
"""`PACKAGE` for the libraries of llama-cpp-python, or the directory that `pyctl setup --dir` was
given.
"""

PACKAGE = "package"

TRIAL = "PYCTL_TRIAL"
"""Variable of a process that tries a native module: the path of its file."""

USE_EXTENSION = "PYCTL_EXTENSION"
"""The variable for whether a process uses the extension; read when llama.cpp's libraries are
loaded.
"""
