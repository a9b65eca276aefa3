"""Make a release: a directory of files from which one command installs pyctl without a compiler.

    python -m tools.release DIR                          # the wheels, the CUDA archive, SHA256SUMS
    python -m tools.release DIR --parts bindings pyctl   # without CUDA
    python -m tools.release DIR --sysroot ROOT  # for a glibc that is older than this machine's

It needs a C++ compiler, and auditwheel, twine, wheel and zstandard from PyPI. ROOT has headers and
libraries of an old system:

    mmdebstrap --variant=extract --include=libc6-dev,libstdc++-10-dev,libgomp1 bullseye ROOT

With it the wheels run with glibc 2.27 if GCC 12 compiles them; auditwheel finds their tag. Compiled
files stay in --work for the next run.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyctl.errors import ConfigError
from pyctl.machine.pin import read_pin
from pyctl.machine.probe import find_compiler
from pyctl.processes.module_command import module_command
from pyctl.setup.build import SETTINGS
from pyctl.setup.plan import MIN_DRIVER
from pyctl.setup.source import Release, open_release, pip_command
from pyctl.setup.toolkit import BuildTools, install_toolkit, install_tools
from tools import matrix

__all__ = [
    "ARCHITECTURES",
    "Work",
    "cuda_archive",
    "required_glibc",
    "write_old_libraries",
    "write_wheel",
]

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("bindings", "pyctl", "cuda")
PYTHONS = (*matrix.PYTHONS, "3.14")

ARCHITECTURES = ("75", "80", "86", "89", "90", "120a")
"""Compute capabilities of the CUDA archive; machine code only, for drivers older than the toolkit
take no PTX.
"""

NVIDIA = ("nvidia-cuda-runtime==13.5.37", "nvidia-cublas==13.10.0.20")
NVIDIA_LIBRARIES = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13")
"""PyPI's packages next to the archive, and the libraries that it needs of them."""

COMMON = {
    **SETTINGS,
    "GGML_NATIVE": "OFF",
    "GGML_RPC": "OFF",  # pyctl's own wheel has it
    "GGML_BACKEND_DL": "ON",
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
    # A wheel has no links: a library with three names would be three files.
    "CMAKE_PLATFORM_NO_VERSIONED_SONAME": "ON",
    "CMAKE_SHARED_LINKER_FLAGS": "-s",
    "CMAKE_MODULE_LINKER_FLAGS": "-s",
}

WRAPPER = """#!/bin/sh
exec {command} "$@"
"""

OLD_ARCHIVE = "libold.a"
OLD_MATH = ("exp", "log", "log2", "pow")
OLD = """__asm__(".symver old_{0},{0}@GLIBC_2.2.5"); double old_{0}({1}); double {0}({1}) {{ return old_{0}({2}); }}
"""
"""Functions that glibc 2.29 has anew; only their errno differs."""


@dataclass(frozen=True)
class Work:
    """The parts of a release share this. ``place`` keeps compiled files, ``environment`` names the
    compilers.
    """

    place: Path
    target: Path
    release: Release
    tools: BuildTools
    environment: Mapping[str, str]
    n_jobs: int

    def compile(self, name: str, values: Mapping[str, str], targets: Sequence[str]) -> Path:
        """Compile ``targets`` with cmake and ninja, and return the directory of the build."""
        build = self.place / name
        values = {"CMAKE_MAKE_PROGRAM": self.tools.ninja, **values}
        defined = [f"-D{key}={value}" for key, value in values.items()]
        source = ["-S", str(self.release.tree), "-B", str(build), "-G", "Ninja"]
        run([self.tools.cmake, *source, *defined], self.environment)
        run(
            [self.tools.ninja, "-C", str(build), "-j", str(self.n_jobs), *targets], self.environment
        )
        return build / "bin"


def run(
    command: Sequence[str], environment: Mapping[str, str] = os.environ, *, quiet: bool = False
) -> str:
    """Run a command and return its output, shown as well unless it is ``quiet``. Raises SystemExit
    if it fails.
    """
    print(f"+ {shlex.join(command)}"[:200], file=sys.stderr, flush=True)
    done = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE if quiet else None, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout or ''}failed ({done.returncode}): {shlex.join(command)}")
    return done.stdout or ""


# -- compilers ----------


def compilers(sysroot: Path | None, place: Path) -> dict[str, str]:
    """Return the environment with CC and CXX, compilers for the libraries of ``sysroot``;
    SystemExit if there is none.
    """
    environment = {
        name: value for name, value in os.environ.items() if name not in ("CMAKE_ARGS", "LDFLAGS")
    }
    found = find_compiler(environment)
    if found is None:
        raise SystemExit("there is no C++ compiler")
    environment |= {"CC": found.cc, "CXX": found.cxx}
    if sysroot is None:
        return environment
    for link in sysroot.rglob("*.so*"):  # absolute ones lead out of it
        if link.is_symlink() and os.readlink(link).startswith("/"):
            inside = f"{sysroot}{os.readlink(link)}"
            link.unlink()
            link.symlink_to(os.path.relpath(inside, link.parent))
    tuples = sorted(sysroot.glob("usr/lib/*-linux-gnu"))
    libraries = [*sysroot.glob("usr/lib/gcc/*/*"), *tuples, *sysroot.glob("lib/*-linux-gnu")]
    headers = [*sysroot.glob("usr/include/c++/*"), *sysroot.glob("usr/include/*/c++/*")]
    headers += sysroot.glob("usr/include/c++/*/backward")
    (place / "compilers").mkdir(parents=True, exist_ok=True)
    if platform.machine() == "x86_64":
        write_old_libraries(libraries, place / "compilers", found.cc)
        libraries.insert(0, place / "compilers")
    flags = [
        f"--sysroot={sysroot}",
        *(f"-B{path}" for path in tuples),
        *(f"-L{path}" for path in libraries),
    ]
    flags += [
        f"-Wl,--exclude-libs,{OLD_ARCHIVE}",
        "-DSUBPROCESS_HAVE_CWD=0",
    ]  # the latter takes glibc 2.29
    for name, more in (
        ("CC", []),
        ("CXX", [word for path in headers for word in ("-isystem", str(path))]),
    ):
        wrapper = place / "compilers" / name.lower()
        wrapper.write_text(
            WRAPPER.format(command=shlex.join([environment[name], *flags, *more])), encoding="utf-8"
        )
        wrapper.chmod(0o755)
        environment[name] = str(wrapper)
    return environment


def write_old_libraries(places: Sequence[Path], place: Path, cc: str) -> None:
    """Write into ``place`` libm and libstdc++ for the linker: before the functions of those in
    ``places`` it takes an archive's, and from there newer parts of the C++ library. The result runs
    with glibc 2.28 and GCC 8.
    """
    source = place / "old.c"
    archive = place / OLD_ARCHIVE
    parameters = {
        name: ("double x, double y", "x, y") if name == "pow" else ("double x", "x")
        for name in OLD_MATH
    }
    source.write_text(
        "".join(OLD.format(name, *parameters[name]) for name in OLD_MATH), encoding="ascii"
    )
    run([cc, "-O2", "-fPIC", "-fno-builtin", "-c", str(source), "-o", str(place / "old.o")])
    found = {path.name: path for each in reversed(places) for path in each.glob("lib*")}
    members = ["fs_dir.o", "fs_ops.o", "fs_path.o", "random.o"]
    run(["ar", "x", "--output", str(place), str(found["libstdc++.a"]), *members])
    run(["ar", "rc", str(archive), *(str(place / name) for name in ["old.o", *members])])
    for name in ("libm.so", "libstdc++.so"):
        (place / name).write_text(f"INPUT ( {archive} {found[name + '.6']} )\n", encoding="utf-8")


def required_glibc(path: Path) -> str:
    """Return the newest glibc whose symbols the ELF file ``path`` names, such as ``2.29``."""
    found = re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", path.read_bytes())
    return "{}.{}".format(*max((int(major), int(minor)) for major, minor in found))


# -- wheels ----------


def write_wheel(path: Path, files: Mapping[str, bytes], information: str) -> None:
    """Write ``files`` and RECORD, which lies in the directory ``information``, as a wheel that is
    always the same.
    """
    rows = [f"{name},sha256={_hash(content)},{len(content)}\n" for name, content in files.items()]
    record = "".join([*rows, f"{information}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for name, content in {**files, f"{information}/RECORD": record}.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o100755 if ".so" in name else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, content)


def _hash(content: bytes) -> str:
    return urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def make_bindings(work: Work) -> Path:
    """Build the bindings' wheel and return its path: their Python files, and llama.cpp with a
    variant of ggml-cpu for each kind of CPU.
    """
    built = work.compile("bindings", {**COMMON, "GGML_CPU_ALL_VARIANTS": "ON"}, ("llama", "mtmd"))
    libraries = sorted(built.glob("lib*.so"))
    openmp = run([work.environment["CC"], "-print-file-name=libgomp.so.1"], quiet=True).strip()
    libraries += (
        [Path(openmp)]
        if any(b"\0libgomp.so.1\0" in path.read_bytes() for path in libraries)
        else []
    )
    information = f"llama_cpp_python-{work.release.version}.dist-info"
    bindings = work.release.bindings
    tag = f"linux_{platform.machine()}"
    files = {
        f"llama_cpp/{path.relative_to(bindings)}": path.read_bytes()
        for path in sorted(bindings.rglob("*"))
        if path.is_file() and path.suffix not in (".so", ".pyc")
    }
    files |= {f"llama_cpp/lib/{path.name}": path.read_bytes() for path in libraries}
    files[f"{information}/METADATA"] = (bindings.parent / "PKG-INFO").read_bytes()
    wheel = f"Wheel-Version: 1.0\nGenerator: pyctl\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n"
    files[f"{information}/WHEEL"] = wheel.encode()
    files[f"{information}/licenses/LICENSE.md"] = (bindings.parent / "LICENSE.md").read_bytes()
    files[f"{information}/licenses/llama.cpp-LICENSE"] = (
        work.release.tree / "LICENSE"
    ).read_bytes()
    made = work.place / f"llama_cpp_python-{work.release.version}-py3-none-{tag}.whl"
    write_wheel(made, files, information)
    return _tagged(made, work)


def make_pyctl(work: Work, python: str) -> Path:
    """Build pyctl's wheel for ``python`` and return its path. pybind11 does not use the stable ABI,
    so each Python has its own.
    """
    run(
        [
            sys.executable,
            str(ROOT / "vendor" / "llama.cpp" / "unpack.py"),
            "--from",
            str(work.release.tree),
        ]
    )
    place = work.place / "pyctl"
    shutil.rmtree(place, ignore_errors=True)
    command = [
        *module_command("pip"),
        "--python",
        python,
        "wheel",
        "--quiet",
        "--disable-pip-version-check",
    ]
    run(
        [*command, "--no-deps", "--no-cache-dir", "--wheel-dir", str(place), str(ROOT)],
        work.environment,
    )
    return _tagged(next(place.glob("*.whl")), work)


def _tagged(wheel: Path, work: Work) -> Path:
    """Move ``wheel`` into the release, with the platform tag that auditwheel finds."""
    shown = run([*module_command("auditwheel"), "show", "--json", str(wheel)], quiet=True)
    tag = str(json.loads(shown)["overall_tag"])
    name = run(
        [*module_command("wheel"), "tags", "--platform-tag", tag, str(wheel)], quiet=True
    ).split()[-1]
    return Path(shutil.move(wheel.with_name(Path(name).name), work.target / Path(name).name))


# -- CUDA ----------


def make_cuda(work: Work, architectures: Sequence[str]) -> Path:
    """Build the archive with libggml-cuda and return its path: a module that ggml loads next to the
    variants for the CPU.
    """
    compiler = find_compiler(work.environment)
    assert compiler is not None
    toolkit = install_toolkit(pip_command(work.place), work.place, compiler)
    values = {
        **COMMON,
        **toolkit.defines(work.environment["CXX"], architectures),
        "GGML_CPU": "OFF",
    }
    library = work.compile("cuda", values, ("ggml-cuda",)) / "libggml-cuda.so"
    files = {
        library.name: library.read_bytes(),
        "llama.cpp-LICENSE": (work.release.tree / "LICENSE").read_bytes(),
    }
    manifest = {
        "format": 1,
        "release": work.release.version,
        "digest": read_pin().digest,
        "toolkit": toolkit.release,
        "architectures": list(architectures),
        "driver": int(MIN_DRIVER),
        "glibc": required_glibc(library),
        "machine": platform.machine(),
        "compiler": run([compiler.cxx, "--version"], quiet=True).splitlines()[0],
        "requirements": list(NVIDIA),
        "libraries": list(NVIDIA_LIBRARIES),
    }
    path = (
        work.target
        / f"pyctl-cuda-{work.release.version}-cuda{toolkit.release}-{platform.machine()}.tar.zst"
    )
    path.write_bytes(cuda_archive(manifest, files))
    return path


def cuda_archive(manifest: Mapping[str, object], files: Mapping[str, bytes]) -> bytes:
    """Return a tar of ``files`` after manifest.json, to which their sizes and hashes are added,
    compressed by zstd.
    """
    import zstandard

    listed = {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        for name, content in files.items()
    }
    text = json.dumps({**manifest, "files": listed}, indent=1).encode() + b"\n"
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in {"manifest.json": text, **files}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return zstandard.ZstdCompressor(level=19, threads=-1).compress(tar.getvalue())


# -- the release ----------


def write_sums(target: Path) -> None:
    """Write SHA256SUMS of all files in ``target``, in sha256sum's format."""
    rows = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(target.iterdir())
        if path.suffix in (".whl", ".zst", ".sh")
    ]
    (target / "SHA256SUMS").write_text("".join(rows), encoding="ascii")


def make(options: argparse.Namespace) -> None:
    """Build the parts into the target directory, with their checksums, and print megabytes of each.
    Wheels of pyctl are built for each Python that is installed.
    """
    target = options.target.absolute()
    place = options.work.absolute()
    target.mkdir(parents=True, exist_ok=True)
    place.mkdir(parents=True, exist_ok=True)
    release = open_release(
        pip_command(place) if options.source is None else [], str(options.source or ""), place
    )
    cmake = shutil.which("cmake")
    ninja = shutil.which("ninja")
    tools = (
        BuildTools(cmake, ninja) if cmake and ninja else install_tools(pip_command(place), place)
    )
    sysroot = options.sysroot.absolute() if options.sysroot else None
    work = Work(place, target, release, tools, compilers(sysroot, place), options.jobs)
    made = [make_bindings(work)] if "bindings" in options.parts else []
    if "pyctl" in options.parts:
        pythons = {version: matrix.interpreter(version) for version in options.pythons}
        missing = [name for name, path in pythons.items() if path is None]
        print(f"not installed: {', '.join(missing) or 'none'}")
        made += [make_pyctl(work, python) for python in pythons.values() if python is not None]
    if made:
        run([*module_command("twine"), "check", *map(str, made)])
    if "cuda" in options.parts:
        made.append(make_cuda(work, options.arch.split(",")))
    write_sums(target)
    for path in made:
        print(f"{path.stat().st_size / 1e6:8.1f} MB  {path.name}")


def main(argv: Sequence[str] | None = None) -> None:
    """Build a release from the command line. SystemExit with the message of a ConfigError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, metavar="DIR")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, metavar="VERSION")
    parser.add_argument(
        "--source", type=Path, help="llama-cpp-python's archive or its directory, instead of pip's"
    )
    parser.add_argument("--sysroot", type=Path, metavar="ROOT")
    parser.add_argument("--arch", default=",".join(ARCHITECTURES), metavar="LIST")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--jobs", "-j", type=int, default=os.cpu_count() or 1)
    try:
        make(parser.parse_args(argv))
    except ConfigError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
