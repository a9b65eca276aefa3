"""The CUDA toolkit that compiles llama.cpp, NVIDIA's packages from PyPI; also cmake and ninja.

It needs no installation: its nvcc finds its own parts wherever the directory lies. CMake does not
guess the names of the libraries in it, so they are passed one by one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyctl.errors import ConfigError
from pyctl.machine.probe import Compiler
from pyctl.setup.source import new_directory, pip_environment

__all__ = [
    "TOOLKIT_RELEASE",
    "BuildTools",
    "Toolkit",
    "install_toolkit",
    "install_tools",
    "install_wheels",
]

TOOLKIT_RELEASE = "13.5.0"

TOOLKIT_WHEELS = (
    "nvidia-cuda-nvcc==13.5.37",
    "nvidia-nvvm==13.5.37",
    "nvidia-cuda-crt==13.5.37",
    "nvidia-cuda-runtime==13.5.37",
    "nvidia-cuda-cccl==13.3.5.0.6",
    "nvidia-cublas==13.10.0.20",
)
"""The parts of CUDA 13.5.0 that compiling needs; all of CUDA 13 runs on drivers from 580 on."""

TOOL_WHEELS = ("cmake>=3.21", "ninja>=1.12", "pybind11>=2.13,<4")

STUB = "void cuDeviceGet(void){} void cuMemCreate(void){}\n"
"""The driver for the linker. It names two symbols that libggml-cuda uses, because --as-needed drops
an empty library; a shared library may leave the other symbols open.
"""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit. ``libraries`` are copied next to llama.cpp's."""

    release: str
    nvcc: Path
    root: Path
    cudart: Path
    cublas: Path
    stub: Path
    libraries: tuple[Path, ...]

    def defines(self, cxx: str, architectures: Sequence[str]) -> dict[str, str]:
        """Return CMake's variables for CUDA, with ``cxx`` as host compiler, for ``architectures``
        such as ``86``.
        """
        return {
            "GGML_CUDA": "ON",
            "GGML_CUDA_NCCL": "OFF",
            "CMAKE_CUDA_HOST_COMPILER": cxx,
            # Machine code only: drivers older than the toolkit do not take its PTX.
            "CMAKE_CUDA_ARCHITECTURES": ";".join(f"{each}-real" for each in architectures),
            "CMAKE_CUDA_COMPILER": str(self.nvcc),
            "CUDAToolkit_ROOT": str(self.root),
            "CUDA_CUDART": str(self.cudart),
            # The shared runtime: the static one hides the functions that pin memory from the
            # extension.
            "CUDA_cudart_LIBRARY": str(self.cudart),
            "CUDA_cublas_LIBRARY": str(self.cublas),
            "CUDA_cuda_driver_LIBRARY": str(self.stub),
        }


@dataclass(frozen=True)
class BuildTools:
    """The paths of cmake and ninja, and pybind11's directory for cmake, which the extension alone
    needs.
    """

    cmake: str
    ninja: str
    pybind11: str = ""


def install_toolkit(pip: Sequence[str], work: Path, compiler: Compiler) -> Toolkit:
    """Install PyPI's toolkit below ``work`` unless it is there. Raises ConfigError."""
    directory = work / f"cuda-{TOOLKIT_RELEASE}"
    root = directory / "nvidia" / "cu13"
    cudart = root / "lib" / "libcudart.so.13"
    cublas = root / "lib" / "libcublas.so.13"
    libraries = (cudart, cublas, root / "lib" / "libcublasLt.so.13")
    install_wheels(pip, TOOLKIT_WHEELS, directory, (root / "bin" / "nvcc", *libraries))
    stub = make_stub(work, compiler)
    return Toolkit(TOOLKIT_RELEASE, root / "bin" / "nvcc", root, cudart, cublas, stub, libraries)


def install_tools(pip: Sequence[str], work: Path) -> BuildTools:
    """Return PyPI's cmake, ninja and pybind11 below ``work``, installed unless they exist. Raises
    ConfigError.
    """
    directory = work / "tools"
    cmake = directory / "cmake" / "data" / "bin" / "cmake"
    ninja = directory / "bin" / "ninja"
    install_wheels(pip, TOOL_WHEELS, directory, (cmake, ninja))
    return BuildTools(
        str(cmake), str(ninja), str(directory / "pybind11" / "share" / "cmake" / "pybind11")
    )


def install_wheels(
    pip: Sequence[str], wheels: Sequence[str], place: Path, needed: Sequence[Path] = ()
) -> None:
    """Install ``wheels`` into the directory ``place``, which appears whole, unless it is there.

    Raises ConfigError if pip fails, or one of the files that are ``needed`` is missing.
    """
    if not place.exists():
        _install(pip, wheels, place)
    if missing := [path.name for path in needed if not path.exists()]:
        raise ConfigError(
            f"{place} lacks {', '.join(missing)}; remove it and run pyctl setup again"
        )


def _install(pip: Sequence[str], wheels: Sequence[str], place: Path) -> None:
    command = [*pip, "install", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    command += [] if sys.stdout.isatty() else ["--quiet"]  # several hundred MB deserve a bar
    with new_directory(place) as part:
        command += ["--only-binary", ":all:", "--no-cache-dir", "--target", str(part), *wheels]
        # pip unpacks in TMPDIR first, which may be small; a user's setting of --user excludes
        # --target.
        environment = {**pip_environment(), "TMPDIR": str(place.parent), "PIP_USER": "0"}
        if subprocess.run(command, env=environment, check=False).returncode != 0:
            raise ConfigError(f"pip could not install {', '.join(wheels)} (see above)")


def make_stub(work: Path, compiler: Compiler) -> Path:
    """Compile the library that the linker uses in place of the driver's. Raises ConfigError if the
    compiler cannot.

    It is not named libcuda.so.1: the loader would find it before the driver's where CMake adds its
    directory to the run path.
    """
    stub = work / "stub" / "libcuda.so"
    stub.parent.mkdir(parents=True, exist_ok=True)
    source = stub.with_name("stub.c")
    source.write_text(STUB, encoding="ascii")
    command = [
        compiler.cc,
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        str(source),
        "-o",
        str(stub),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    if shown.returncode != 0:
        raise ConfigError(
            f"{compiler.cc} cannot link a shared library: {shown.stderr.strip()[-500:]}"
        )
    return stub
