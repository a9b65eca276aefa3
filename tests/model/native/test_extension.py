"""The check that library, headers and extension belong together."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_cpp as api

from pyctl import __version__, _core
from pyctl.errors import LibraryMismatchError
from pyctl.llama.library import extension
from pyctl.llama.library.native import HostBuffer

ROOT = Path(__file__).resolve().parents[3]


def test_versions_are_stated_alike_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{__version__}"\n' in project
    assert version("pyctl-llama") == __version__
    pin = (ROOT / "vendor/llama.cpp/pin.txt").read_text()
    assert f"\nllama-cpp-python=={_core.BINDINGS_VERSION} --hash=sha256:" in pin
    assert f"llama-cpp-python=={_core.BINDINGS_VERSION}" in project
    assert extension.library_versions()["llama.cpp"] == _core.LLAMA_VERSION


def test_a_mismatch_names_both_versions() -> None:
    loaded = {"llama-cpp-python": "0.3.36", "llama.cpp": "0.6.0", "ggml": "0.25.3"}
    built = {"llama-cpp-python": "0.3.36", "llama.cpp": "0.5.0", "ggml": "0.25.3"}
    with pytest.raises(
        LibraryMismatchError, match=r"built for llama.cpp 0\.5\.0.*0\.6\.0 is loaded"
    ):
        extension.check_versions(built, loaded)
    extension.check_versions({**built, "llama.cpp": ""}, {**loaded, "llama.cpp": "unknown"})
    with pytest.raises(LibraryMismatchError):
        extension.check_versions({**built, "llama.cpp": ""}, loaded)


GROWN = """
struct params { char known[%d]; long more; };
struct params make(void) { struct params made = {{1}, 123456789}; return made; }
long take(void * model, struct params given) { return given.more + (model != 0); }
"""


@pytest.mark.parametrize("bindings", [api.llama_model_params, api.llama_context_params])
def test_fields_of_a_later_release_come_back_as_they_were(bindings: Any, tmp_path: Path) -> None:
    """A struct that grew by 8 bytes at its end is written and read where the bindings have
    memory.
    """
    path = tmp_path / "grown.so"
    source = GROWN % ctypes.sizeof(bindings)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    library = ctypes.CDLL(str(path))
    library.make.restype = extension.with_trailing_space(bindings)
    library.take.restype = ctypes.c_long
    library.take.argtypes = [ctypes.c_void_p, bindings]
    assert library.take(None, library.make()) == 123456789


BESIDE = """
import ctypes, sys

def before(event, names):
    if event == "ctypes.dlopen" and "libllama" in str(names[0]) and not loaded:
        loaded.append(True)
        ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

loaded = []
sys.addaudithook(before)
from pyctl.llama.library.native import HostBuffer
assert loaded
HostBuffer(0)
"""


def test_errors_arrive_where_a_library_has_its_own_cpp_runtime(tmp_path: Path) -> None:
    """A library linked with -static-libstdc++ exports a part of its runtime to all that is loaded
    after it; errors of the extension still arrive.
    """
    other = tmp_path / "other.so"
    source = 'extern "C" int f() { try { throw 1; } catch (int one) { return one; } }'
    command = [
        "c++",
        "-shared",
        "-fPIC",
        "-static-libstdc++",
        "-static-libgcc",
        "-x",
        "c++",
        "-",
        "-o",
        str(other),
    ]
    subprocess.run(command, input=source, text=True, check=True)
    done = subprocess.run(
        [sys.executable, "-c", BESIDE, str(other)], capture_output=True, text=True, check=False
    )
    assert done.stderr.endswith("ValueError: a host buffer needs at least one byte\n"), done


def test_host_buffers_are_writable_memory() -> None:
    buffer = HostBuffer(1000)
    view = memoryview(buffer)
    assert len(buffer) == view.nbytes == 1000
    view[:] = bytes(range(250)) * 4
    assert bytes(view[:250]) == bytes(range(250))
    assert not buffer.pinned
    with pytest.raises(ValueError, match="at least one byte"):
        HostBuffer(0)
