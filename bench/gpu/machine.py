"""The machine that is measured: its names, its memory, its drive, and the compilers that llama.cpp
is built with.

Only the standard library and `pyctl.setup` are needed, since prepare.py runs before anything else
is there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from pyctl.machine.probe import find_compiler, find_driver

__all__ = [
    "Cuda",
    "available_mib",
    "cached_share",
    "compilers",
    "describe",
    "direct_rate",
    "find_cuda",
    "free_vram_mib",
    "settle",
    "storage_reads",
    "vram_mib",
]

REPOSITORY = Path(__file__).resolve().parents[2]


def _output(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=REPOSITORY
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def describe(weights: str) -> dict[str, str]:
    """Return the head of each page of results: commit, date (UTC), machine, command, and
    ``weights`` as given.

    Absolute paths in the command are shown by their last part.
    """
    from pyctl.llama.library.extension import build_version

    gpus = _gpus("name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max")
    gpu = gpus[0] if gpus else []
    cuda = next((part for part in _output("nvidia-smi").split("|") if "CUDA Version" in part), "")
    models = [
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cpu = models[0].partition(": ")[2] if models else platform.processor()
    memory = Path("/proc/meminfo").read_text().split()[1]
    parts = [f"{cpu}, {len(os.sched_getaffinity(0))} cores, {int(memory) / 2**20:.0f} GiB"]
    if len(gpu) == 5:
        shown = f"{len(gpus)} x {gpu[0]}, {gpu[2]}, PCIe {gpu[3]} x{gpu[4]}"
        parts.insert(0, f"{shown}, driver {gpu[1]}, {' '.join(cuda.split()[-3:])}")
    parts += [f"Linux {platform.release()}, Python {platform.python_version()}", build_version()]
    return {
        "commit": _output("git", "rev-parse", "--short", "HEAD") or _head(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": "; ".join(parts),
        "command": f"`{_command()}`",
        "weights": weights,
    }


def _command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).stem
    given = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["python", "-m", name, *given])


def _head() -> str:
    """Return the commit that HEAD.txt names, as in a copy of the tree without git; "" without that
    file.
    """
    try:
        return (REPOSITORY / "HEAD.txt").read_text(encoding="utf-8").split()[0]
    except (OSError, IndexError):
        return ""


def vram_mib() -> float | None:
    """Return MiB in use on all GPUs that CUDA_VISIBLE_DEVICES leaves; None without one."""
    sizes = _memory("used")
    return sum(sizes) if sizes else None


def free_vram_mib() -> float | None:
    """Return MiB that are free on the first of the GPUs that CUDA_VISIBLE_DEVICES leaves; None
    without one.
    """
    sizes = _memory("free")
    return sizes[0] if sizes else None


def _memory(what: str) -> list[float]:
    return [float(gpu[0].split()[0]) for gpu in _gpus(f"memory.{what}")]


def _gpus(fields: str) -> list[list[str]]:
    """Return nvidia-smi's fields of each GPU that CUDA_VISIBLE_DEVICES leaves, by field."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = [f"--id={visible}"] if visible else []
    lines = _output(
        "nvidia-smi", *chosen, f"--query-gpu={fields}", "--format=csv,noheader"
    ).splitlines()
    return [[part.strip() for part in line.split(",")] for line in lines]


def available_mib() -> float:
    """Return MiB that could be had without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable:"))


def storage_reads(pid: int) -> int:
    """Return bytes that the process had fetched from storage, not from the page cache."""
    lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


BLOCK = 4 * 2**20
LIMIT = 4 * 2**30
"""Enough to measure the drive's speed."""


def settle(directory: Path, quiet: float = 4.0, limit: float = 60.0) -> int:
    """Wait until the sizes of all files have not changed for ``quiet`` seconds; returns the bytes.

    The server writes spilled snapshots once it has had no request for two seconds.
    """
    began = since = time.monotonic()
    before: dict[str, int] = {}
    while time.monotonic() - since < quiet and time.monotonic() - began < limit:
        now = {}
        for path in sorted(directory.rglob("*")):
            try:
                now[str(path)] = path.stat().st_size
            except FileNotFoundError:
                continue  # renamed while we looked
        if now != before:
            before = now
            since = time.monotonic()
        time.sleep(0.1)
    return sum(before.values())


def cached_share(files: Sequence[Path]) -> float:
    """Return the share of the files' pages that is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    cached = pages = 0
    for path in files:
        size = path.stat().st_size
        if not size:
            continue
        count = -(-size // mmap.PAGESIZE)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
            state = ctypes.create_string_buffer(count)
            if libc.mincore(address, size, state) == 0:
                cached += sum(byte & 1 for byte in state.raw[:count])
            pages += count
            libc.munmap(address, size)
        finally:
            os.close(descriptor)
    return cached / pages if pages else 0.0


def direct_rate(files: Sequence[Path], streams: int) -> float | None:
    """Return GB/s of reading the files in order past the page cache, ``streams`` blocks at a time;
    None if that is refused.
    """
    spans = []
    for path in sorted(files, key=lambda path: path.stat().st_size, reverse=True):
        size = path.stat().st_size // BLOCK * BLOCK
        spans += [(path, at) for at in range(0, size, BLOCK)]
    spans = spans[: LIMIT // BLOCK]
    if not spans:
        return None
    try:
        descriptors = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _ in spans}
    except OSError:
        return None
    buffers = [mmap.mmap(-1, BLOCK) for _ in range(streams)]

    def read(stream: int) -> int:
        return sum(
            os.preadv(descriptors[path], [buffers[stream]], at)
            for path, at in spans[stream::streams]
        )

    try:
        with ThreadPoolExecutor(streams) as pool:
            began = time.perf_counter()
            total = sum(pool.map(read, range(streams)))
            return total / (time.perf_counter() - began) / 1e9
    except OSError:
        return None
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
        for buffer in buffers:
            buffer.close()


@dataclass(frozen=True)
class Cuda:
    """The toolkit's ``root``, cmake options that find its parts, and directories its libraries load
    from.
    """

    root: Path
    architectures: str
    options: tuple[str, ...]
    library_dirs: tuple[Path, ...]
    environment: dict[str, str] = field(default_factory=dict)


def compilers() -> dict[str, str]:
    """Return CC, CXX and CUDAHOSTCXX of a C++ compiler that links the C++ library as a shared one.
    SystemExit without one.
    """
    compiler = find_compiler()
    if compiler is None or not compiler.is_shared:
        raise SystemExit("no C++ compiler that links its library as a shared one; name one by CXX")
    return {"CXX": compiler.cxx, "CUDAHOSTCXX": compiler.cxx, "CC": compiler.cc}


def find_cuda(architectures: str | None, *, build: bool) -> Cuda | None:
    """Return the toolkit of this machine, for its own GPU unless ``architectures`` names others.

    If nothing is to be built with it (``build``), None if there is none; else SystemExit.
    """
    known = [
        shutil.which("nvcc"),
        *sorted(map(str, Path("/usr/local").glob("cuda*/bin/nvcc")), reverse=True),
    ]
    nvcc = next((Path(path) for path in known if path is not None), None)
    if nvcc is None:
        if build:
            raise SystemExit("no nvcc: install the CUDA toolkit, give --libs, or --cpu")
        return None
    root = _root(nvcc)
    places = [root / "lib64", root / "targets/x86_64-linux/lib", root / "lib"]
    options = []
    environment = {"CUDACXX": str(nvcc)}
    if not any((place / "libcublas.so").exists() for place in places):
        # Some images have it only as a Python package, without the link that a linker looks for.
        library = _find("libcublas.so*")
        if library is not None:
            light = next(iter(sorted(library.parent.glob("libcublasLt.so*"))), library)
            options += [f"-DCUDA_cublas_LIBRARY={library}", f"-DCUDA_cublasLt_LIBRARY={light}"]
            places.append(library.parent)
        header = _find("cublas_v2.h")
        if header is not None:
            environment["CPATH"] = str(header.parent)
    if not any(True for _ in root.rglob("libcuda.so")):
        options.append("-DGGML_CUDA_NO_VMM=ON")  # no stub of the driver to link to
    dirs = tuple(place for place in places if place.is_dir())
    return Cuda(
        root, architectures or (_architecture() if build else ""), tuple(options), dirs, environment
    )


def _root(nvcc: Path) -> Path:
    """Return the root of the toolkit; the nvcc on the path may be a script that calls another."""
    with tempfile.NamedTemporaryFile(suffix=".cu") as empty:
        command = [str(nvcc), "--dryrun", "-c", empty.name, "-o", os.devnull]
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    top = re.search(r"^#\$ TOP=(.+)$", shown, re.MULTILINE)
    return Path(top[1].strip()).resolve() if top is not None else nvcc.resolve().parent.parent


def _architecture() -> str:
    driver = find_driver()
    if driver is None or not driver.cards:
        raise SystemExit("the driver shows no GPU: give --arch, such as 86-real for a 3090")
    return ";".join(sorted({f"{card.architecture}-real" for card in driver.cards}))


def _find(name: str) -> Path | None:
    command = ["find", "/", "-xdev", "-name", name, "-not", "-path", "/proc/*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    return min((Path(line) for line in found if line), default=None)
