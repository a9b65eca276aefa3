"""What a build of llama.cpp needs to know about this machine: its compiler, its CUDA toolkit, its GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Cuda", "compilers", "find_cuda"]


@dataclass(frozen=True)
class Cuda:
    """The toolkit's ``root``, cmake options that find its parts, and directories its libraries load from."""

    root: Path
    architectures: str
    options: tuple[str, ...]
    library_dirs: tuple[Path, ...]
    environment: dict[str, str] = field(default_factory=dict)


def compilers() -> dict[str, str]:
    """CC, CXX and CUDAHOSTCXX of the first C++ compiler that links libstdc++ as a shared library.

    One that links it statically gives the extension a second copy beside Python's other modules, and the first
    exception that crosses between the two ends the process. SystemExit if there is none.
    """
    tried = []
    for name in (os.environ.get("CXX", ""), "/usr/bin/g++", "g++", "c++", "clang++"):
        path = shutil.which(name) if name else None
        if path is None or path in tried:
            continue
        tried.append(path)
        if _shares_its_library(path):
            c = {"g++": "gcc", "c++": "cc", "clang++": "clang"}.get(Path(path).name, "cc")
            beside = Path(path).with_name(c)
            return {"CXX": path, "CUDAHOSTCXX": path, "CC": str(beside) if beside.exists() else c}
    raise SystemExit(f"no C++ compiler that links libstdc++ as a shared library; tried {', '.join(tried) or 'none'}")


def _shares_its_library(compiler: str) -> bool:
    with tempfile.TemporaryDirectory() as name:
        source, library = Path(name) / "probe.cpp", Path(name) / "probe.so"
        source.write_text("#include <string>\nstd::string twice(const std::string & s) { return s + s; }\n")
        command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return False
        needed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=False).stdout
        return any(f"[{shared}" in needed for shared in ("libstdc++.so", "libc++.so"))


def find_cuda(architectures: str | None, *, build: bool) -> Cuda | None:
    """The toolkit of this machine, for its own GPU unless ``architectures`` says otherwise.

    Where nothing is to be built with it (``build``), None if there is none; else SystemExit.
    """
    known = [shutil.which("nvcc"), *sorted(map(str, Path("/usr/local").glob("cuda*/bin/nvcc")), reverse=True)]
    nvcc = next((Path(path) for path in known if path is not None), None)
    if nvcc is None:
        if build:
            raise SystemExit("no nvcc: install the CUDA toolkit, give --libs, or --cpu")
        return None
    root = _root(nvcc)
    places = [root / "lib64", root / "targets/x86_64-linux/lib", root / "lib"]
    options, environment = [], {"CUDACXX": str(nvcc)}
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
    return Cuda(root, architectures or (_architecture() if build else ""), tuple(options), dirs, environment)


def _root(nvcc: Path) -> Path:
    """Where the toolkit lies; the nvcc on the path may be a script that calls another."""
    with tempfile.NamedTemporaryFile(suffix=".cu") as empty:
        command = [str(nvcc), "--dryrun", "-c", empty.name, "-o", os.devnull]
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    top = re.search(r"^#\$ TOP=(.+)$", shown, re.MULTILINE)
    return Path(top[1].strip()).resolve() if top is not None else nvcc.resolve().parent.parent


def _architecture() -> str:
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit("nvidia-smi shows no GPU: give --arch, such as 86-real for a 3090") from error
    return ";".join(sorted({f"{capability.replace('.', '')}-real" for capability in shown}))


def _find(name: str) -> Path | None:
    command = ["find", "/", "-xdev", "-name", name, "-not", "-path", "/proc/*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    return min((Path(line) for line in found if line), default=None)
