"""The plan of `pyctl setup`: the libraries to build, with which toolkit, or the reason why it
cannot.

Pure: decisions follow from the `Machine` and the options.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pyctl.errors import ConfigError
from pyctl.machine.libraries import capability
from pyctl.machine.probe import AMD, Compiler, Machine
from pyctl.setup.toolkit import TOOLKIT_RELEASE

__all__ = [
    "DRIVER_ERRORS",
    "BuildPlan",
    "check_compiler",
    "check_room",
    "describe",
    "describe_build",
    "jobs_for",
    "make_plan",
    "parse_architectures",
]

GIB = 2**30

MIN_DRIVER = "580"
"""The first driver that supports CUDA 13."""
MIN_CUDA = (13, 0)
"""The CUDA version that the driver has to support."""
MIN_CAPABILITY = (7, 5)
"""The lowest compute capability that CUDA 13 supports: Turing."""

JOB_BYTES = int(1.2 * GIB)
"""Memory of one compilation; the largest kernels take 0.9 GiB."""

CUDA_SECONDS = 2712.0
"""CPU seconds to compile the kernels for one architecture."""
CPU_SECONDS = 500.0
"""CPU seconds to compile all C++ files."""

CUDA_BYTES = int(2.6 * GIB)
"""Disk that a build for cards needs at most; after it about 0.7 GiB remain."""
CPU_BYTES = int(0.7 * GIB)
"""Disk that a build for the CPU needs at most; after it about 20 MiB remain."""

DRIVER_ERRORS = {
    34: (
        "a stub of libcuda.so.1 is in the library path; remove its directory from LD_LIBRARY_PATH"
    ),
    100: (
        "the driver shows no card; look at CUDA_VISIBLE_DEVICES, and start a container with "
        "--gpus all"
    ),
    802: "the system is not ready; start NVIDIA's fabric manager",
    803: (
        "the driver's library and its kernel module differ, as after an update; restart the machine"
    ),
    999: "the driver fails to start; load its module: sudo nvidia-modprobe -u",
}
"""Results of cuInit, and remedies."""


@dataclass(frozen=True)
class BuildPlan:
    """A build for cards with ``architectures``, or for the CPU without any; ``why`` is one line.

    It ``is_needed`` unless the libraries that pip installed are all that this machine can use.
    """

    why: str
    architectures: tuple[str, ...] = ()
    is_needed: bool = True


MAX_MAJOR = 19
"""Highest first number of a compute capability that --arch takes; the cards of 2026 have 12."""


def parse_architectures(text: str) -> tuple[str, ...]:
    """Return ``86,9.0`` or ``86-real;90-real`` as (``86``, ``90``). Raises ConfigError."""
    architectures = []
    for word in re.split(r"[,;\s]+", text.strip()):
        match = re.fullmatch(r"(?:sm_)?(\d{1,2})\.?(\d)([af]?)(?:-real)?", word)
        if match is None:
            raise ConfigError(
                f"--arch: {word!r} is not a compute capability; a 3090 has 86 (several: 86,89)"
            )
        if int(match[1]) > MAX_MAJOR:
            raise ConfigError(
                f"--arch: no card has the compute capability {match[1]}.{match[2]}; a 3090 has 86"
            )
        architectures.append("".join(match.groups()))
    return tuple(dict.fromkeys(architectures))


def make_plan(
    machine: Machine, architectures: tuple[str, ...] = (), *, cpu: bool = False
) -> BuildPlan:
    """Return the plan for ``--arch`` or ``--cpu``, or without them for the cards. Raises
    ConfigError if that cannot be built here.
    """
    if cpu:
        return BuildPlan("for the CPU only, because --cpu was given: no graphics card will be used")
    if architectures:
        why = f"for compute capability {', '.join(architectures)}, because --arch was given"
        return _with_toolkit(machine, architectures, why)
    if machine.driver is None and machine.has_nvidia:
        raise ConfigError(
            "this machine has an NVIDIA card, but its driver is not found (libcuda.so.1); install "
            "the driver "
            f"({MIN_DRIVER} or newer; Ubuntu: sudo apt install nvidia-driver-{MIN_DRIVER}), or "
            "start the container "
            "with --gpus all; to build for the CPU: pyctl setup --cpu"
        )
    if machine.driver is not None and machine.driver.error:
        hint = DRIVER_ERRORS.get(machine.driver.error, "see the system's log (dmesg)")
        raise ConfigError(f"the NVIDIA driver reports error {machine.driver.error}: {hint}")
    if not machine.cards:
        cards_text = "no NVIDIA card"
        if AMD in machine.pci_cards:
            cards_text = (
                "an AMD card, which takes a build by hand (docs/install.md), and no NVIDIA card"
            )
        return BuildPlan(
            f"nothing to do: this machine has {cards_text}; pyctl runs on the CPU", is_needed=False
        )
    architectures = tuple(dict.fromkeys(card.architecture for card in machine.cards))
    why = f"for {', '.join(dict.fromkeys(card.name for card in machine.cards))}"
    return _with_toolkit(machine, architectures, why)


def _with_toolkit(machine: Machine, architectures: tuple[str, ...], why: str) -> BuildPlan:
    """Return the plan for ``architectures``. Raises ConfigError if CUDA 13 does not support them or
    this machine.
    """
    driver = machine.driver
    problem = ""
    if old := [
        architecture for architecture in architectures if capability(architecture) < MIN_CAPABILITY
    ]:
        problem = (
            f"CUDA 13 has no support for compute capability {', '.join(old)} (docs/install.md)"
        )
    elif driver is not None and driver.cuda < MIN_CUDA:
        problem = (
            f"the NVIDIA driver supports CUDA {_dotted(driver.cuda)}, and CUDA 13 needs driver "
            f"{MIN_DRIVER} or newer; "
            f"update the driver (Ubuntu: sudo apt install nvidia-driver-{MIN_DRIVER})"
        )
    elif not machine.libc.startswith("glibc") or machine.processor not in ("x86_64", "aarch64"):
        problem = (
            f"NVIDIA's packages need glibc on x86_64 or aarch64, not {machine.libc} on "
            f"{machine.processor}"
        )
    if problem:
        raise ConfigError(f"{problem}; to build for the CPU: pyctl setup --cpu")
    return BuildPlan(f"{why}, with CUDA {TOOLKIT_RELEASE} from PyPI", architectures)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def check_compiler(machine: Machine) -> Compiler:
    """Return the compiler of ``machine``. Raises ConfigError with the command that installs one."""
    compiler = machine.compiler
    if compiler is None:
        raise ConfigError(
            "a C++ compiler is not installed: sudo apt install g++ (Fedora: sudo dnf install "
            "gcc-c++, Arch: sudo "
            "pacman -S gcc)"
        )
    if not compiler.is_shared:
        raise ConfigError(
            f"{compiler.cxx} links the C++ library statically, and llama.cpp's libraries then "
            "fail with Python's "
            "modules; name another compiler by CXX"
        )
    return compiler


def check_room(plan: BuildPlan, free: int, where: object) -> None:
    """Raise ConfigError if ``free`` bytes at ``where`` are too few for the build."""
    needed = CUDA_BYTES if plan.architectures else CPU_BYTES
    if free < needed:
        raise ConfigError(
            f"{where} has {free / GIB:.1f} GiB free, and the build needs {needed / GIB:.1f} GiB; "
            "see --dir"
        )


def jobs_for(machine: Machine, wanted: int) -> int:
    """Return the number of compilers at a time: ``wanted`` if given, else one for each core as far
    as the memory allows.
    """
    return wanted or max(min(machine.n_cores, machine.n_ram // JOB_BYTES), 1)


def describe(machine: Machine) -> str:
    """Return one line about the cards and the driver."""
    driver = machine.driver
    if driver is None or not driver.cards:
        return (
            "found: an NVIDIA card without a working driver"
            if machine.has_nvidia
            else "found: no NVIDIA card"
        )
    cards = ", ".join(
        f"{card.name} ({card.n_bytes / GIB:.0f} GiB, compute capability {_dotted(card.capability)})"
        for card in driver.cards
    )
    return (
        f"found: {cards}; driver {driver.release or 'of unknown release'} (CUDA "
        f"{_dotted(driver.cuda)})"
    )


def describe_build(compiler: Compiler, plan: BuildPlan, n_jobs: int) -> str:
    """Return two lines about the build to come."""
    minutes = max(round((CPU_SECONDS + CUDA_SECONDS * len(plan.architectures)) / n_jobs / 60), 1)
    return f"build: {plan.why}\n       about {minutes} minutes with {n_jobs} jobs of {compiler.cxx}"
