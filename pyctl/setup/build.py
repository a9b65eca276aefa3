"""Compile llama.cpp's libraries into a separate directory.

All files of a build are in one work directory. An interrupted build resumes where it stopped.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

from pyctl.errors import ConfigError
from pyctl.machine.libraries import (
    BINDINGS,
    EXTENSION,
    MODULES,
    BuiltLibraries,
    cpu_features,
    write_built,
)
from pyctl.machine.pin import extension_digest, extension_source, read_pin
from pyctl.machine.probe import Compiler
from pyctl.processes.module_process import end_with_parent
from pyctl.setup.parameter_layout import lay_out
from pyctl.setup.release_files import Manifest
from pyctl.setup.source import Release
from pyctl.setup.toolkit import BuildTools, Toolkit

__all__ = [
    "Build",
    "build_lock",
    "compile_extension",
    "compile_libraries",
    "place_libraries",
    "stage_libraries",
    "stage_release",
]

TARGETS = ("llama", "mtmd")
"""libllama needs libggml, and that all of its backends."""

LIBRARY_NAMES = "lib*.so*"
LOG = "setup.log"

SETTINGS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "GGML_NATIVE": "ON",
    "GGML_RPC": "ON",
    "LLAMA_BUILD_COMMON": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_TOOLS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_MTMD": "ON",
    "LLAMA_OPENSSL": "OFF",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
}


@dataclass(frozen=True)
class Build:
    """A build: for the CPU without ``toolkit``, else for ``architectures``, such as ``86``.

    ``release`` is None for the pinned one.
    """

    work: Path
    compiler: Compiler
    tools: BuildTools
    n_jobs: int
    toolkit: Toolkit | None = None
    architectures: tuple[str, ...] = ()
    release: Release | None = None

    @property
    def name(self) -> str:
        """The name of the directory with the finished libraries, such as
        ``0.3.36-cuda13.5.0-86``.
        """
        release = read_pin().release if self.release is None else f"own-{self.release.name}"
        if not self.architectures:
            return f"{release}-cpu"
        toolkit = self.toolkit.release if self.toolkit is not None else ""
        return f"{release}-cuda{toolkit}-{'_'.join(self.architectures)}"

    @property
    def directory(self) -> Path:
        """The directory where cmake and ninja work."""
        return self.work / f"build-{self.name}"


@contextmanager
def build_lock(work: Path) -> Iterator[None]:
    """Hold the lock of ``work`` during the block. Raises ConfigError if another process has it."""
    work.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(
        work.with_name(f"{work.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another pyctl setup is building in {work}") from error
        yield
    finally:
        os.close(descriptor)


def compile_libraries(build: Build, source: Path) -> None:
    """Compile llama.cpp; ninja shows its steps and errors. Raises ConfigError if that fails."""
    if _compile(build, build.directory, source, defines(build)) != 0:
        raise ConfigError(
            f"the compilation with {build.compiler.cxx} failed (see above); if the memory was too "
            "small: pyctl setup "
            f"--jobs {max(build.n_jobs // 2, 1)}"
        )


def compile_extension(build: Build, release: Release) -> dict[str, str]:
    """Compile the native modules into ``extension`` of the build's directory, against the headers
    of ``release``.

    Returns the reason of each that does not compile; there is one for each module if cmake fails.
    """
    directory = build.directory / EXTENSION
    shutil.rmtree(directory, ignore_errors=True)
    values = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": build.tools.ninja,
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": build.tools.pybind11,
        "LLAMA_DIR": str(release.tree),
        "BINDINGS_VERSION": release.version,
    }
    print("compiling the extension", flush=True)
    directory.mkdir(parents=True)
    with (directory / LOG).open("w", encoding="utf-8") as log:
        _compile(build, directory, extension_source(), values, log)
    text = (directory / LOG).read_text(encoding="utf-8", errors="replace")
    missing = {}
    for name in MODULES:
        if not any(directory.glob(f"{name}.*so")):
            match = re.search(
                rf"^FAILED: [^\n]*\b{name}\.dir.*?\b(error: [^\n]+)", text, re.MULTILINE | re.DOTALL
            )
            match = match or re.search(r"^CMake (Error[^\n]*\n[^\n]*)", text, re.MULTILINE)
            reason = f"it needs {MODULES[0]}" if MODULES[0] in missing else "it does not compile"
            missing[name] = " ".join(match[1].split()) if match is not None else reason
    return missing


def _compile(
    build: Build, place: Path, source: Path, values: Mapping[str, str], log: TextIO | None = None
) -> int:
    """Run cmake with ``values`` and ninja in ``place``; return the exit code of the last one.

    With a ``log`` they continue after errors, and their output goes there. Ninja ends its compilers
    and itself when this process is interrupted or killed.
    """
    environment = _environment(build)
    command = [build.tools.cmake, "-S", str(source), "-B", str(place), "-G", "Ninja"]
    command += [f"-D{name}={value}" for name, value in values.items()]
    quiet = log if log is not None else subprocess.DEVNULL
    if code := subprocess.run(
        command, stdout=quiet, stderr=log, env=environment, check=False
    ).returncode:
        return code
    command = [*(["nice"] if shutil.which("nice") else []), build.tools.ninja]
    command += [
        "-C",
        str(place),
        "-j",
        str(build.n_jobs),
        *(TARGETS if log is None else ("-k", "0")),
    ]
    end = partial(end_with_parent, signal.SIGINT)
    with subprocess.Popen(
        command, stdout=log, stderr=log, env=environment, preexec_fn=end
    ) as process:
        try:
            return process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise


def _environment(build: Build) -> dict[str, str]:
    """Return the variables for cmake and ninja, without those that select another build."""
    compilers = {"CC": build.compiler.cc, "CXX": build.compiler.cxx}
    environment = {**os.environ, **compilers, "NINJA_STATUS": "[%f/%t, %W left] "}
    for name in ("CMAKE_ARGS", "LDFLAGS", "CUDACXX", "CMAKE_GENERATOR", "CUDAARCHS"):
        environment.pop(name, None)
    return environment


def defines(build: Build) -> dict[str, str]:
    """Return CMake's variables for ``build``."""
    values = dict(SETTINGS, CMAKE_MAKE_PROGRAM=build.tools.ninja)
    if build.toolkit is not None:
        values |= build.toolkit.defines(build.compiler.cxx, build.architectures)
    return values


def stage_libraries(
    build: Build, home: Path, built: float, missing: Mapping[str, str] = MappingProxyType({})
) -> BuiltLibraries:
    """Collect the build in a hidden directory below ``home``, to be checked; links stay links.

    ``built`` is the time in seconds since 1970. Another release than the pinned one has its
    bindings next to them, and its modules but those that are ``missing`` for a reason.
    """
    directory = home / "llama" / f".{build.name}"
    release = build.release
    toolkit = build.toolkit
    new_stage(
        directory, [build.directory / "bin"], toolkit.libraries if toolkit is not None else ()
    )
    if release is not None:
        ignored = shutil.ignore_patterns("lib", "*.so*", "__pycache__")
        bindings = directory / BINDINGS / "llama_cpp"
        shutil.copytree(release.bindings, bindings, ignore=ignored)
        if not release.has_bindings and (
            changed := lay_out(bindings, release.tree, build.compiler.cxx)
        ):
            print(f"laid out as the headers have them: {', '.join(changed)}", flush=True)
        (directory / EXTENSION).mkdir()
        for name in set(MODULES) - missing.keys():
            for file in (build.directory / EXTENSION).glob(f"{name}.*so"):
                shutil.copy2(file, directory / EXTENSION)
    return write_built(
        BuiltLibraries(
            release=release.name if release is not None else read_pin().release,
            toolkit=toolkit.release if toolkit is not None else "",
            architectures=build.architectures,
            features=cpu_features(),
            files={},
            built=built,
            directory=directory,
            digests={"archive": release.digest, "csrc": extension_digest()}
            if release is not None
            else {},
            missing=dict(missing),
        )
    )


def new_stage(directory: Path, places: Iterable[Path], others: Iterable[Path]) -> None:
    """Make ``directory`` anew, with the libraries of ``places``, whose links stay links, and
    ``others``.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for path in sorted(path for source in places for path in source.glob(LIBRARY_NAMES)):
        shutil.copy2(path, directory / path.name, follow_symlinks=False)
    for path in others:
        shutil.copy2(path, directory / path.name)


def stage_release(
    manifest: Manifest, places: Sequence[Path], nvidia: Path, home: Path
) -> BuiltLibraries:
    """Collect the libraries of ``places``, the release's for CPUs and for cards, and NVIDIA's in
    ``nvidia`` in a hidden directory below ``home``.
    """
    release = read_pin().release
    architectures = manifest.architectures
    directory = home / "llama" / f".{release}-cuda{manifest.toolkit}-{'_'.join(architectures)}"
    new_stage(directory, places, [nvidia / name for name in manifest.libraries])
    # No CPU features: the libraries choose their variant at their start.
    return write_built(
        BuiltLibraries(release, manifest.toolkit, architectures, (), {}, time.time(), directory)
    )


def place_libraries(staged: BuiltLibraries) -> Path:
    """Give the checked libraries their name; processes that run on an earlier build with that name
    keep its files.
    """
    name = staged.directory.name.removeprefix(".")
    target = staged.directory.with_name(name)
    old = staged.directory.with_name(f".{name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    staged.directory.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    return target
