"""The plan of `pyctl setup`: the libraries to build, with which toolkit, or the reason why it cannot.

Pure: decisions follow from the `Machine` and the options.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pyctl.errors import ConfigError
from pyctl.setup.libraries import capability
from pyctl.setup.machine import AMD, Card, Compiler, Machine
from pyctl.setup.toolkit import TOOLKIT_RELEASE

__all__ = [
    "DRIVER_ERRORS",
    "BuildPlan",
    "check_compiler",
    "check_room",
    "describe",
    "describe_build",
    "duration",
    "jobs_for",
    "make_plan",
    "missing_packages",
    "parse_architectures",
]

GIB = 2**30

MIN_DRIVER, MIN_CUDA = "580", (13, 0)
MIN_CAPABILITY = (7, 5)
"""What CUDA 13 supports: drivers from 580 on, cards from Turing on."""

JOB_BYTES = int(1.2 * GIB)
"""Memory of one compilation; the largest kernels take 0.9 GiB."""

CUDA_SECONDS, CPU_SECONDS = 2712.0, 500.0
"""CPU seconds to compile the kernels for one architecture, and all C++ files."""

CUDA_BYTES, CPU_BYTES = int(2.6 * GIB), int(0.7 * GIB)
"""Disk that a build needs at most; after it about 0.7 GiB and 20 MiB remain."""

SIZES = {
    "cpu": "0.1 GB to download, 20 MB afterwards",
    "pypi": "0.7 GB to download, 0.7 GB afterwards",
}

DRIVER_ERRORS = {
    34: "a stub of libcuda.so.1 lies in the library path; remove its directory from LD_LIBRARY_PATH",
    100: "the driver shows no card; look at CUDA_VISIBLE_DEVICES, and start a container with --gpus all",
    802: "the system is not ready; start NVIDIA's fabric manager",
    803: "the driver's library and its kernel module differ, as after an update; restart the machine",
    999: "the driver fails to start; load its module: sudo nvidia-modprobe -u",
}
"""Results of cuInit, and what to do."""

INSTALL = {
    "a C++ compiler": ("g++", "gcc-c++", "gcc"),
    "Python's headers": ("python3-dev", "python3-devel", "python"),
}

Kind = Literal["none", "cpu", "pypi"]
"""No build, one without a toolkit, or with the one of PyPI."""


@dataclass(frozen=True)
class BuildPlan:
    """``kind`` names the toolkit: ``cpu`` is a build without one, ``none`` no build. ``why`` is one line."""

    kind: Kind
    why: str
    architectures: tuple[str, ...] = ()


def missing_packages(machine: Machine) -> str:
    """The packages for compiling that ``machine`` lacks, with the command that installs them; empty if none."""
    lacks = ["a C++ compiler"] * (machine.compiler is None) + ["Python's headers"] * (machine.headers is None)
    if not lacks:
        return ""
    debian, fedora, arch = (" ".join(names) for names in zip(*(INSTALL[what] for what in lacks), strict=True))
    return (
        f"{' and '.join(lacks)} {'are' if len(lacks) > 1 or lacks[0].endswith('s') else 'is'} not installed: "
        f"sudo apt install {debian} (Fedora: sudo dnf install {fedora}, Arch: sudo pacman -S {arch})"
    )


def parse_architectures(text: str) -> tuple[str, ...]:
    """``86,9.0`` or ``86-real;90-real`` as (``86``, ``90``). Raises ConfigError."""
    found = []
    for word in re.split(r"[,;\s]+", text.strip()):
        match = re.fullmatch(r"(?:sm_)?(\d{1,2})\.?(\d)([af]?)(?:-real)?", word)
        if match is None:
            raise ConfigError(f"--arch: {word!r} is no compute capability; a 3090 has 86 (several: 86,89)")
        found.append("".join(match.groups()))
    return tuple(dict.fromkeys(found))


def make_plan(machine: Machine, architectures: tuple[str, ...] = (), *, cpu: bool = False) -> BuildPlan:
    """Decide, with what ``--arch`` or ``--cpu`` asks for. Raises ConfigError if that or what the cards need cannot be
    built here."""
    if cpu:
        return BuildPlan("cpu", "for the CPU only, because --cpu was given: no graphics card will be used")
    if architectures:
        why = f"for compute capability {', '.join(architectures)}, because --arch was given"
        return _with_toolkit(machine, architectures, why)
    if not machine.has_nvidia and machine.driver is None:
        return BuildPlan("none", _no_card(machine))
    if machine.driver is None:
        raise ConfigError(
            "this machine has an NVIDIA card, but its driver is not found (libcuda.so.1); install the driver "
            f"({MIN_DRIVER} or newer; Ubuntu: sudo apt install nvidia-driver-{MIN_DRIVER}), or start the container "
            "with --gpus all; to build for the CPU: pyctl setup --cpu"
        )
    if machine.driver.error:
        hint = DRIVER_ERRORS.get(machine.driver.error, "see the system's log (dmesg)")
        raise ConfigError(f"the NVIDIA driver reports error {machine.driver.error}: {hint}")
    if not machine.cards:
        return BuildPlan("none", _no_card(machine))
    architectures = tuple(dict.fromkeys(card.architecture for card in machine.cards))
    why = f"for {', '.join(dict.fromkeys(card.name for card in machine.cards))}"
    return _with_toolkit(machine, architectures, why)


def _no_card(machine: Machine) -> str:
    if AMD in machine.pci_cards:
        return (
            "nothing to do: this machine has an AMD card and no NVIDIA card; pyctl runs on the CPU. "
            "A build for HIP has to be made by hand (docs/install.md)"
        )
    return "nothing to do: this machine has no NVIDIA card; pyctl runs on the CPU with the libraries that pip built"


def _with_toolkit(machine: Machine, architectures: tuple[str, ...], why: str) -> BuildPlan:
    """The plan for ``architectures``. Raises ConfigError if CUDA 13 does not support them or this machine."""
    driver, problem = machine.driver, ""
    if old := [each for each in architectures if capability(each) < MIN_CAPABILITY]:
        problem = f"CUDA 13 has no support for compute capability {', '.join(old)} (docs/install.md)"
    elif driver is not None and driver.cuda < MIN_CUDA:
        problem = (
            f"the NVIDIA driver {driver.release or ''} supports CUDA {_dotted(driver.cuda)}, and CUDA 13 needs driver "
            f"{MIN_DRIVER} or newer; update the driver (Ubuntu: sudo apt install nvidia-driver-{MIN_DRIVER})"
        ).replace("  ", " ")
    elif not machine.libc.startswith("glibc") or machine.processor not in ("x86_64", "aarch64"):
        problem = f"NVIDIA's packages need glibc on x86_64 or aarch64, not {machine.libc} on {machine.processor}"
    if problem:
        raise ConfigError(f"{problem}; to build for the CPU: pyctl setup --cpu")
    return BuildPlan("pypi", f"{why}, with CUDA {TOOLKIT_RELEASE} from PyPI", architectures)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def check_compiler(machine: Machine) -> Compiler:
    """The compiler of ``machine``. Raises ConfigError with the command that installs one."""
    compiler = machine.compiler
    if compiler is None:
        raise ConfigError(missing_packages(replace(machine, headers=Path())))  # the extension is compiled already
    if not compiler.is_shared:
        raise ConfigError(
            f"{compiler.cxx} links the C++ library statically, and llama.cpp's libraries then fail beside Python's "
            "modules; name another compiler by CXX"
        )
    return compiler


def check_room(plan: BuildPlan, free: int, where: object) -> None:
    """Raises ConfigError if ``free`` bytes at ``where`` are too few for the build."""
    needed = CPU_BYTES if plan.kind == "cpu" else CUDA_BYTES
    if free < needed:
        raise ConfigError(
            f"{where} has {free / GIB:.1f} GiB free, and the build needs {needed / GIB:.1f} GiB; see --dir"
        )


def jobs_for(machine: Machine, wanted: int) -> int:
    """Compilers at a time: ``wanted`` if given, else one for each core as far as the memory goes."""
    return wanted or max(min(machine.n_cores, machine.n_ram // JOB_BYTES), 1)


def describe(machine: Machine) -> str:
    """One line about the cards and the driver."""
    if machine.cards:
        return "found: " + ", ".join(map(_card, machine.cards)) + f"; driver {_driver(machine)}"
    if machine.has_nvidia:
        return "found: an NVIDIA card without a working driver"
    return "found: no NVIDIA card"


def describe_build(machine: Machine, plan: BuildPlan, n_jobs: int) -> str:
    """Two lines about what will be compiled."""
    about = duration((CPU_SECONDS + CUDA_SECONDS * len(plan.architectures)) / n_jobs)
    compiler = machine.compiler.cxx if machine.compiler is not None else "no C++ compiler"
    return f"build: {plan.why}\n       about {about} with {n_jobs} jobs of {compiler}, {SIZES[plan.kind]}"


def duration(seconds: float) -> str:
    """Seconds below two minutes, else minutes, or hours and minutes."""
    if seconds < 120:
        return f"{max(round(seconds), 1)} seconds"
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes < 120 else f"{minutes // 60} hours {minutes % 60} minutes"


def _card(card: Card) -> str:
    return f"{card.name} ({card.n_bytes / GIB:.0f} GiB, compute capability {_dotted(card.capability)})"


def _driver(machine: Machine) -> str:
    assert machine.driver is not None
    return f"{machine.driver.release or 'of unknown release'} (CUDA {_dotted(machine.driver.cuda)})"
