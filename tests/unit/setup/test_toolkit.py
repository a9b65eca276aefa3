"""The CUDA toolkit and the build tools, from a made-up pip."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyctl.errors import ConfigError
from pyctl.machine.probe import Compiler
from pyctl.setup.toolkit import BuildTools, install_toolkit, install_tools
from tests.unit.setup.programs import PIP, Programs


def test_the_toolkit_is_installed_once_and_whole(
    programs: Programs, work: Path, compiler: Compiler
) -> None:
    """Parts of the toolkit are installed with pinned versions and no dependencies, a failed
    installation is tried again, and a complete one is kept. One without cuBLAS is an error.
    """
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


def test_a_pip_that_brings_nothing_is_an_error(
    programs: Programs, work: Path, compiler: Compiler
) -> None:
    pip = [programs.make("pip", "exit 0")]
    with pytest.raises(ConfigError, match="lacks nvcc"):
        install_toolkit(pip, work, compiler)
    with pytest.raises(ConfigError, match="lacks cmake"):
        install_tools(pip, work)
