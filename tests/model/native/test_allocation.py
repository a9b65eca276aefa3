"""Large arrays of llama.cpp start at a cache line. Each test is a process: what it loads first
counts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ALLOCATE = """
import ctypes
import pyctl.llama.library.bindings
libraries = ctypes.CDLL(None)
new = libraries["_Znam"]
new.restype, new.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
delete = libraries["_ZdaPv"]
delete.argtypes = [ctypes.c_void_p]
sizes = [0, 1, 4095, *(4096 + 1000 * i for i in range(20)), 1 << 22]
arrays = [(size, new(size)) for size in sizes]
assert len({array for _, array in arrays}) == len(arrays)
print(all(array % 64 == 0 for size, array in arrays if size >= 4096))
for size, array in arrays:
    ctypes.memset(array, 1, size)
    delete(array)
"""


def run(script: str, **environment: str) -> str:
    """Return the output of ``script`` in a process of its own."""
    command = [sys.executable, "-c", script]
    variables = {**os.environ, **environment}
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_large_arrays_start_at_a_cache_line_and_are_released() -> None:
    assert run(ALLOCATE) == "True"


def test_ggml_allocates_with_it(tmp_path: Path) -> None:
    """The linker reports the library that it takes each function from."""
    report = {"LD_BIND_NOW": "1", "LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "ld")}
    run("import pyctl.llama.library.bindings", **report)
    lines = "".join(path.read_text("utf-8") for path in tmp_path.glob("ld.*"))
    found = re.findall(r"/libggml-cpu\.so\S* \[0\] to \S+/([\w.+-]+) \[0\].*`_Znam'", lines)
    assert found == ["libpyctl-allocation.so"]
