"""Toolkit and build with made-up pip, compiler, cmake and ninja: small scripts that note how they
were called.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from pyctl.errors import ConfigError
from pyctl.machine.libraries import libraries_at
from pyctl.machine.pin import read_pin
from pyctl.machine.probe import Compiler
from pyctl.setup.build import (
    Build,
    build_lock,
    compile_libraries,
    defines,
    place_libraries,
    stage_libraries,
)
from pyctl.setup.toolkit import BuildTools, install_toolkit
from tests.unit.setup.programs import CMAKE, NINJA, PIP, Programs


@pytest.fixture
def make_build(programs: Programs, work: Path, compiler: Compiler) -> Callable[[], Build]:
    def make() -> Build:
        tools = BuildTools(programs.make("cmake", CMAKE), programs.make("ninja", NINJA))
        return Build(work, compiler, tools, 2)

    return make


def test_a_build_becomes_a_directory_that_a_process_uses(
    make_build: Callable[[], Build],
    programs: Programs,
    work: Path,
    tmp_path: Path,
    compiler: Compiler,
) -> None:
    """A build is staged apart and gets its place only in one step, so that no process finds half a
    build. A second one of the same name replaces it.
    """
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
    assert built.architectures == ("86", "90")
    assert built.built == 7.0
    assert built.toolkit == "13.5.0"
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
    assert cpu["GGML_NATIVE"] == "ON"
    assert cpu["GGML_RPC"] == "ON"
    assert cpu["CMAKE_INSTALL_RPATH"] == "$ORIGIN"
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
    """An interrupt that arrives before Popen has returned ends ninja as well."""
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
