"""Toolkit and build with made-up pip, compiler, cmake and ninja: small scripts that note how they
were called.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from pyctl.errors import ConfigError
from pyctl.machine.libraries import libraries_at
from pyctl.machine.pin import read_pin
from pyctl.machine.probe import Compiler
from pyctl.processes.module_command import module_command
from pyctl.setup.build import (
    Build,
    build_lock,
    compile_libraries,
    defines,
    place_libraries,
    stage_libraries,
)
from pyctl.setup.source import open_release, pip_command
from pyctl.setup.toolkit import BuildTools, install_toolkit, install_tools

PIP = """
echo "$@" >> {calls}
while [ $# -gt 0 ]; do
  case $1 in --target) T=$2;; --dest) D=$2;; cmake*) C=1;; ninja*) N=1;; nvidia-cublas*) B=1;; esac
  shift
done
[ -e {broken} ] && echo no such package >&2 && exit 1
if [ "$B" ]; then
  mkdir -p $T/nvidia/cu13/bin $T/nvidia/cu13/lib
  touch $T/nvidia/cu13/bin/nvcc
  for each in cudart cublas cublasLt; do echo $each > $T/nvidia/cu13/lib/lib$each.so.13; done
fi
[ "$C" ] && mkdir -p $T/cmake/data/bin && touch $T/cmake/data/bin/cmake
[ "$N" ] && mkdir -p $T/bin && touch $T/bin/ninja
if [ "$D" ]; then
  mkdir -p $D/x/llama_cpp/vendor/llama.cpp/src && echo source > $D/x/llama_cpp/vendor/llama.cpp/src/a.cpp
  tar -czf $D/llama_cpp.tar.gz -C $D/x llama_cpp
fi
exit 0
"""

CMAKE = """
echo "$CC $CXX $@" >> {calls}
"""

NINJA = """
echo "$NINJA_STATUS $@" >> {calls}
echo "[1/3] Building CXX object a.cpp.o"
[ -e {broken} ] && cat {broken} && exit 1
mkdir -p $2/bin && cd $2/bin && echo library > libllama.so.0 && ln -sf libllama.so.0 libllama.so && touch libmtmd.so
exit 0
"""


@dataclass
class Programs:
    """The scripts and their directory; ``broken`` makes them fail with its text while it exists."""

    directory: Path

    @property
    def calls(self) -> Path:
        return self.directory / "calls"

    @property
    def broken(self) -> Path:
        return self.directory / "broken"

    def make(self, name: str, script: str) -> str:
        path = self.directory / name
        path.write_text(
            "#!/bin/sh\n" + script.format(calls=self.calls, broken=self.broken), encoding="utf-8"
        )
        path.chmod(0o755)
        return str(path)

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    (tmp_path / "programs").mkdir()
    return Programs(tmp_path / "programs")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def compiler() -> Compiler:
    return Compiler("c++", "cc", True)


@pytest.fixture
def make_build(programs: Programs, work: Path, compiler: Compiler) -> Callable[[], Build]:
    def make() -> Build:
        tools = BuildTools(programs.make("cmake", CMAKE), programs.make("ninja", NINJA))
        return Build(work, compiler, tools, 2)

    return make


def test_the_toolkit_is_installed_once_and_whole(
    programs: Programs, work: Path, compiler: Compiler
) -> None:
    pip = [programs.make("pip", PIP)]
    programs.broken.touch()
    with pytest.raises(ConfigError, match="pip could not install nvidia-cuda-nvcc==13"):
        install_toolkit(pip, work, compiler)
    programs.broken.unlink()
    toolkit = install_toolkit(pip, work, compiler)
    assert install_toolkit(pip, work, compiler) == toolkit
    assert len(programs.called()) == 2
    assert all(
        flag in programs.called()[1]
        for flag in ("--no-deps", "--only-binary :all:", "nvidia-cublas==13.")
    )
    # The linker drops an empty library, and the loader must not find this one by the driver's name.
    stub = toolkit.stub.read_bytes()
    assert all(word in stub for word in (b"libcuda.so.1", b"cuDeviceGet", b"cuMemCreate"))
    assert toolkit.stub.name == "libcuda.so"
    toolkit.cublas.unlink()
    with pytest.raises(ConfigError, match=r"lacks libcublas\.so\.13"):
        install_toolkit(pip, work, compiler)


def test_cmake_and_ninja_come_from_pypi_once(programs: Programs, work: Path) -> None:
    pip = [programs.make("pip", PIP)]
    tools = install_tools(pip, work)
    assert install_tools(pip, work) == tools
    paths = "cmake/data/bin/cmake", "bin/ninja", "pybind11/share/cmake/pybind11"
    assert tools == BuildTools(*(str(work / "tools" / path) for path in paths))
    (call,) = programs.called()
    assert "cmake>=" in call


def test_the_source_is_fetched_once_and_verified(programs: Programs, work: Path) -> None:
    pip = [programs.make("pip", PIP)]
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"llama_cpp\.tar\.gz is not the pinned release; remove it"
        ):
            open_release(pip, "", work)
    (call,) = programs.called()
    assert "--require-hashes" in call
    assert str(read_pin().path) in call


def test_a_pip_that_brings_nothing_is_an_error(
    programs: Programs, work: Path, compiler: Compiler
) -> None:
    pip = [programs.make("pip", "exit 0")]
    with pytest.raises(
        ConfigError, match="pip ended well, but fetched no source of llama-cpp-python=="
    ):
        open_release(pip, "", work)
    with pytest.raises(ConfigError, match="lacks nvcc"):
        install_toolkit(pip, work, compiler)
    with pytest.raises(ConfigError, match="lacks cmake"):
        install_tools(pip, work)


def test_pip_is_that_of_this_environment(work: Path) -> None:
    assert pip_command(work) == module_command("pip")


def test_a_build_becomes_a_directory_that_a_process_uses(
    make_build: Callable[[], Build],
    programs: Programs,
    work: Path,
    tmp_path: Path,
    compiler: Compiler,
) -> None:
    toolkit = install_toolkit([programs.make("pip", PIP)], work, compiler)
    build = replace(make_build(), toolkit=toolkit, architectures=("86", "90"))
    with build_lock(work):
        compile_libraries(build, work / "source")
    _, cmake, ninja = programs.called()
    assert cmake.startswith("cc c++ -S ")
    assert f"-DCUDA_cublas_LIBRARY={toolkit.cublas}" in cmake
    assert ninja == f"[%f/%t, %W left]  -C {build.directory} -j 2 llama mtmd"
    home = tmp_path / "home"
    staged = stage_libraries(build, home, 7.0)
    assert libraries_at(home) == []  # not before the check
    target = place_libraries(staged)
    assert target.name == f"{read_pin().release}-cuda13.5.0-86_90"
    (built,) = libraries_at(home)
    assert (built.architectures, built.built, built.toolkit) == (("86", "90"), 7.0, "13.5.0")
    assert (target / "libllama.so").is_symlink()
    assert (target / "libcublas.so.13").read_text() == "cublas\n"
    # Once more in its place.
    place_libraries(stage_libraries(build, home, 8.0))
    assert [built.built for built in libraries_at(home)] == [8.0]
    assert [path.name for path in (home / "llama").iterdir()] == [target.name]


def test_what_cmake_is_told(
    make_build: Callable[[], Build], programs: Programs, work: Path, compiler: Compiler
) -> None:
    build = make_build()
    cpu = defines(build)
    assert (cpu["GGML_NATIVE"], cpu["GGML_RPC"], cpu["CMAKE_INSTALL_RPATH"]) == (
        "ON",
        "ON",
        "$ORIGIN",
    )
    assert "GGML_CUDA" not in cpu
    toolkit = install_toolkit([programs.make("pip", PIP)], work, compiler)
    cuda = defines(replace(build, toolkit=toolkit, architectures=("86", "120a")))
    assert cuda["CMAKE_CUDA_ARCHITECTURES"] == "86-real;120a-real"
    assert cuda["CUDA_cudart_LIBRARY"].endswith(
        "libcudart.so.13"
    )  # the static one hides what pins memory


def test_a_failed_compilation_shows_what_ninja_says(
    make_build: Callable[[], Build],
    programs: Programs,
    work: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    programs.broken.write_text("FAILED: a.o\nerror: expected ';'\n")
    with (
        build_lock(work),
        pytest.raises(
            ConfigError, match=r"the compilation with c\+\+ failed \(see above\); .* --jobs 1"
        ),
    ):
        compile_libraries(make_build(), work / "source")
    assert "error: expected ';'" in capfd.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ninja_ends_with_this_process(
    make_build: Callable[[], Build], programs: Programs, work: Path, number: int
) -> None:
    """An interrupt may arrive before Popen has returned: ninja ends then, too."""
    waiting = (
        'trap "echo ended >> {calls}; exit 2" INT; echo started >> {calls}; while :; do :; done'
    )
    tools = replace(make_build().tools, ninja=programs.make("ninja-that-waits", waiting))
    build = replace(make_build(), tools=tools)
    process = get_context("fork").Process(target=compile_libraries, args=(build, work / "source"))
    process.start()
    assert process.pid is not None
    while not programs.calls.exists() or programs.called()[-1] != "started":
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == (1 if number == signal.SIGINT else -number)
    while programs.called()[-1] != "ended":
        time.sleep(0.01)


def test_two_builds_exclude_each_other(work: Path) -> None:
    with (
        build_lock(work),
        pytest.raises(ConfigError, match="another pyctl setup is building"),
        build_lock(work),
    ):
        pass
    with build_lock(work):
        pass
