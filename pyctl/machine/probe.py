"""Facts about this machine: NVIDIA driver, cards, compilers, cores, memory. Nothing is changed and
nothing is decided.

Needs neither nvidia-smi nor llama.cpp. The driver is asked by ctypes and initialised in this
process.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pyctl.machine.control_groups import memory_groups, read_text

__all__ = [
    "AMD",
    "NVIDIA",
    "Card",
    "Compiler",
    "Driver",
    "Machine",
    "find_compiler",
    "find_driver",
    "find_pci_cards",
    "free_bytes",
    "meminfo",
    "probe_machine",
]

DRIVER_PLACES = (
    "libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",  # WSL2
    "/run/opengl-driver/lib/libcuda.so.1",  # NixOS
    "/usr/local/nvidia/lib64/libcuda.so.1",  # some images
)
"""The places of the driver's library, in the order of the search; the first name is the loader's
own search.
"""

NVIDIA = "0x10de"
"""The PCI vendor id of NVIDIA."""
AMD = "0x1002"
"""The PCI vendor id of AMD."""

DISPLAY_CLASSES = ("0x03", "0x12")
"""PCI classes of cards: display controllers, and processing accelerators, which some AMD cards are.
"""

PROBE_SECONDS = 30.0

MAJOR = 75
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR."""
MINOR = 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR."""


@dataclass(frozen=True)
class Card:
    """A card as the NVIDIA driver reports it. ``capability`` is (8, 6) for a 3090, ``n_bytes`` its
    whole memory.
    """

    name: str
    capability: tuple[int, int]
    n_bytes: int

    @property
    def architecture(self) -> str:
        """The capability as nvcc writes it, such as ``86``."""
        return "{}{}".format(*self.capability)


@dataclass(frozen=True)
class Driver:
    """The facts from libcuda.so.1.

    ``cuda`` is the newest supported CUDA version, (0, 0) if unknown. ``release`` is the kernel
    module's, such as ``580.159.03``, or empty. ``error`` is the CUresult of the first call that
    failed, 0 if none did; there are no cards then.
    """

    cuda: tuple[int, int]
    release: str
    cards: tuple[Card, ...] = ()
    error: int = 0


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler. ``is_shared``: it links the C++ library as a shared one.

    One that links it statically gives the extension a second copy besides Python's other modules',
    and the first exception that crosses between the two ends the process.
    """

    cxx: str
    cc: str
    is_shared: bool


@dataclass(frozen=True)
class Machine:
    """The facts by which `pyctl setup` and `pyctl doctor` decide. Sizes are bytes.

    ``pci_cards`` are the vendor ids of cards on the bus, with or without a driver. ``libc`` is such
    as ``glibc 2.41``, ``processor`` such as ``x86_64``. ``n_cores`` and ``n_ram`` respect the
    limits of a container.
    """

    driver: Driver | None
    pci_cards: tuple[str, ...]
    compiler: Compiler | None
    n_cores: int
    n_ram: int
    libc: str
    processor: str

    @property
    def cards(self) -> tuple[Card, ...]:
        """The cards that CUDA programs can use."""
        return self.driver.cards if self.driver is not None else ()

    @property
    def has_nvidia(self) -> bool:
        """True if there is an NVIDIA card, usable or not."""
        return bool(self.cards) or NVIDIA in self.pci_cards


def probe_machine(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Machine:
    """Return the facts of this machine; takes about a second. ``root`` is the parent of /sys and
    /proc.
    """
    return Machine(
        driver=find_driver(root=root),
        pci_cards=find_pci_cards(root),
        compiler=find_compiler(environ),
        n_cores=_cores(root),
        n_ram=min([meminfo("MemTotal", root), *(group.limit for group in memory_groups(root))]),
        libc=" ".join(platform.libc_ver()).strip(),
        processor=platform.machine(),
    )


# -- cards
# ----------------------------------------------------------------------------------


def find_driver(places: Sequence[str] = DRIVER_PLACES, root: Path = Path("/")) -> Driver | None:
    """Return the driver from the first libcuda.so.1 of ``places`` that loads; None without one."""
    for name in places:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return _query_driver(library, read_text(root / "sys/module/nvidia/version"))
    return None


def _query_driver(library: ctypes.CDLL, release: str) -> Driver:
    """Return the driver's version and cards, or the first error of its library."""
    number = ctypes.c_int(0)
    cuda = (0, 0)
    if not library.cuDriverGetVersion(ctypes.byref(number)):
        cuda = (number.value // 1000, number.value % 1000 // 10)
    error = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(number))
    cards = []
    for index in range(0 if error else number.value):
        device = ctypes.c_int(0)
        major = ctypes.c_int(0)
        minor = ctypes.c_int(0)
        size = ctypes.c_size_t(0)
        name = ctypes.create_string_buffer(256)
        error = (
            library.cuDeviceGet(ctypes.byref(device), index)
            or library.cuDeviceGetName(name, len(name), device)
            or library.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device)
            or library.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device)
            or library.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        )
        if error:
            return Driver(cuda, release, error=error)
        cards.append(
            Card(name.value.decode("utf-8", "replace"), (major.value, minor.value), size.value)
        )
    return Driver(cuda, release, tuple(cards), error)


def find_pci_cards(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the vendor ids of NVIDIA's and AMD's cards on the PCI bus, in the order of their
    addresses.
    """
    vendors = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor = read_text(device / "vendor")
        if vendor in (NVIDIA, AMD) and read_text(device / "class").startswith(DISPLAY_CLASSES):
            vendors.append(vendor)
    return tuple(vendors)


# -- programs
# ----------------------------------------------------------------------------------


def find_compiler(environ: Mapping[str, str] = os.environ) -> Compiler | None:
    """Return the first C++ compiler that compiles and links the C++ library as a shared one, else
    the first that compiles.

    CXX comes first, the system's g++ before other ones in PATH.
    """
    names = (environ.get("CXX", ""), "/usr/bin/g++", "g++", "c++", "clang++")
    first = None
    paths = (shutil.which(name, path=environ.get("PATH")) for name in names)
    for path in dict.fromkeys(filter(None, paths)):
        if (is_shared := _links_cxx(path)) is not None:
            compiler = Compiler(path, _c_compiler(path, environ), is_shared)
            if is_shared:
                return compiler
            first = first or compiler
    return first


def _c_compiler(path: str, environ: Mapping[str, str]) -> str:
    """Return the C compiler that belongs to the C++ compiler at ``path``."""
    c = {"g++": "gcc", "c++": "cc", "clang++": "clang"}.get(Path(path).name, "cc")
    beside = Path(path).with_name(c)
    return environ.get("CC") or (str(beside) if beside.exists() else c)


def _links_cxx(compiler: str) -> bool | None:
    """Return whether ``compiler`` links the C++ library as a shared one; None if it cannot
    compile.
    """
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "probe.cpp"
        library = Path(name) / "probe.so"
        source.write_text(
            "#include <string>\nstd::string twice(const std::string & s) { return s + s; }\n"
        )
        command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=False)
        if not library.exists():
            return None
        # The names of needed libraries stand in the file as they are.
        return any(shared in library.read_bytes() for shared in (b"libstdc++.so", b"libc++.so"))


# -- cores, memory, disk
# ----------------------------------------------------------------------------------


def _cores(root: Path) -> int:
    n_cores = len(os.sched_getaffinity(0))
    quota, _, period = read_text(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        n_cores = min(n_cores, math.ceil(int(quota) / int(period)))
    return max(n_cores, 1)


def meminfo(name: str, root: Path = Path("/")) -> int:
    """Return the bytes that the kernel has under ``name``, such as MemTotal; 0 if it does not
    report it.
    """
    match = re.search(rf"^{name}: +(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write at ``path``, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free
