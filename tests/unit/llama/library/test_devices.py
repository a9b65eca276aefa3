"""Backends that are files: where ggml looks for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pyctl.llama.library.extension import library_file

START = """
import ctypes, importlib, sys
from types import SimpleNamespace
# The package has a function of this name.
devices = importlib.import_module("pyctl.llama.library.devices")
found = []
ggml = dict(
    ggml_backend_reg_count=lambda: int(sys.argv[1]),
    ggml_backend_load_all_from_path=found.append,
)
devices.ggml_library = lambda: SimpleNamespace(**ggml)
devices.start_backends(), devices.start_backends()
print(*map(bytes.decode, found), hasattr(ctypes.CDLL(None), "cudaHostRegister"), sep="|")
"""


@pytest.mark.parametrize("n_linked", [0, 1])
def test_backends_are_loaded_once_from_beside_the_library_unless_they_are_linked(
    n_linked: int,
) -> None:
    loaded = subprocess.check_output(
        [sys.executable, "-c", START, str(n_linked)], text=True, timeout=120
    ).strip()
    assert loaded == ("False" if n_linked else f"{library_file('')}|False")


def test_functions_of_cuda_are_found_that_a_backend_in_a_file_brings(tmp_path: Path) -> None:
    """A function of the CUDA runtime is found where only a backend's file links against it, as in
    llama.cpp's builds with backends loaded at run time.
    """
    code = "int cudaHostRegister(void) { return 0; }"
    for name, more in (
        ("cudart", ()),
        ("ggml-cuda", ("-L.", "-Wl,--no-as-needed", "-lcudart", "-Wl,-rpath,$ORIGIN")),
    ):
        command = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", f"lib{name}.so", *more]
        subprocess.run(
            command, input=code if name == "cudart" else "", text=True, cwd=tmp_path, check=True
        )
    elsewhere = "import llama_cpp.llama_cpp as api; api._base_path = sys.argv[2]\ndevices.start"
    command = [
        sys.executable,
        "-c",
        START.replace("devices.start", elsewhere, 1),
        "0",
        str(tmp_path),
    ]
    assert subprocess.check_output(command, text=True, timeout=120).strip() == f"{tmp_path}|True"
