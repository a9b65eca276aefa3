"""Compile llama.cpp's libraries into a directory of their own.

All files of a build lie in one work directory. A build that was interrupted goes on where it stopped.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pyctl.errors import ConfigError
from pyctl.setup.libraries import BuiltLibraries, cpu_features, write_built
from pyctl.setup.machine import Compiler
from pyctl.setup.plan import duration
from pyctl.setup.source import Pin, download_source, read_pin, unpack_source
from pyctl.setup.toolkit import BuildTools, Toolkit

__all__ = ["Build", "build_lock", "compile_libraries", "place_libraries", "stage_libraries", "unpacked_source"]

TARGETS = ("llama", "mtmd")
"""libllama needs libggml, and that all of its backends."""

LIBRARY_NAMES = "lib*.so*"

LAST_LINES = 30
"""Lines of a failed compilation that an error shows."""

STEP = re.compile(r"\[([1-9][0-9]*)/([0-9]+)\] ")
"""A line of ninja: steps that have ended, and all."""

REPORT_SECONDS = 20.0
"""Time between two lines of progress where the output is no terminal."""

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
}


@dataclass(frozen=True)
class Build:
    """One build: for the CPU without ``toolkit``, else for ``architectures``, such as ``86``."""

    work: Path
    compiler: Compiler
    tools: BuildTools
    n_jobs: int
    toolkit: Toolkit | None = None
    architectures: tuple[str, ...] = ()
    say: Callable[[str], None] = field(default=print)
    now: Callable[[], float] = field(default=time.monotonic)

    @property
    def name(self) -> str:
        """The name of the directory with the finished libraries, such as ``0.3.36-cuda13.5.0-86``."""
        release = read_pin().release
        if self.toolkit is None:
            return f"{release}-cpu"
        return f"{release}-cuda{self.toolkit.release}-{'_'.join(self.architectures)}"

    @property
    def directory(self) -> Path:
        """Where cmake and ninja work."""
        return self.work / f"build-{self.name}"

    @property
    def log(self) -> Path:
        """The output of cmake and ninja."""
        return self.directory / "setup.log"


@contextmanager
def build_lock(work: Path) -> Iterator[int]:
    """Hold the lock of ``work`` during the block; yields its descriptor. Raises ConfigError if another process has it.

    Ninja inherits the descriptor, so the lock also outlasts a process that was killed while ninja still runs.
    """
    work.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another pyctl setup is building in {work}") from error
        yield descriptor
    finally:
        os.close(descriptor)


def unpacked_source(pip: list[str], work: Path) -> Path:
    """llama.cpp's source of the pinned release below ``work``; pip fetches and verifies it. Raises ConfigError."""
    pin: Pin = read_pin()
    source = work / f"source-{pin.release}"
    if source.exists():
        return source
    part = work / f"source-{pin.release}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    archive = download_source(pip, part)
    unpack_source(archive, part / "tree")
    (part / "tree").rename(source)
    shutil.rmtree(part)
    return source


def compile_libraries(build: Build, source: Path, lock: int) -> None:
    """Run cmake and ninja. Raises ConfigError with the end of the log if one of them fails."""
    build.directory.mkdir(parents=True, exist_ok=True)
    build.log.unlink(missing_ok=True)
    command = [build.tools.cmake, "-S", str(source), "-B", str(build.directory), "-G", "Ninja"]
    environment = {**os.environ, "CC": build.compiler.cc, "CXX": build.compiler.cxx, "NINJA_STATUS": "[%f/%t] "}
    for name in ("CMAKE_ARGS", "LDFLAGS", "CUDACXX", "CMAKE_GENERATOR", "CUDAARCHS"):
        environment.pop(name, None)
    build.say("configuring")
    with build.log.open("a", encoding="utf-8") as log:
        defined = [f"-D{name}={value}" for name, value in defines(build).items()]
        shown = subprocess.run([*command, *defined], stdout=log, stderr=log, env=environment, check=False)
    if shown.returncode != 0:
        raise ConfigError(f"cmake failed:\n{end_of_log(build.log)}")
    polite = ["nice", "-n", "10"] if shutil.which("nice") else []
    command = [*polite, build.tools.ninja, "-C", str(build.directory), "-j", str(build.n_jobs), *TARGETS]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        pass_fds=(lock,),
    ) as process:
        try:
            code = _follow(process, build)
        except KeyboardInterrupt:
            # A terminal sends the signal to ninja too, which ends its compilers.
            process.send_signal(signal.SIGINT)
            process.wait()
            build.say("stopped; run pyctl setup again to go on")
            raise
        finally:
            if process.poll() is None:
                process.terminate()
    if code != 0:
        raise ConfigError(failure(build))


def defines(build: Build) -> dict[str, str]:
    """CMake's variables for ``build``."""
    run_paths = ["$ORIGIN"]
    values = dict(SETTINGS, CMAKE_MAKE_PROGRAM=build.tools.ninja)
    if build.toolkit is not None:
        values |= build.toolkit.defines()
        values |= {"GGML_CUDA": "ON", "GGML_CUDA_NCCL": "OFF", "CMAKE_CUDA_HOST_COMPILER": build.compiler.cxx}
        # Machine code only: drivers older than the toolkit do not take its PTX.
        values["CMAKE_CUDA_ARCHITECTURES"] = ";".join(f"{each}-real" for each in build.architectures)
        run_paths += build.toolkit.run_paths
    values["CMAKE_INSTALL_RPATH"] = ";".join(run_paths)
    return values


def _follow(process: subprocess.Popen[str], build: Build) -> int:
    """Copy ninja's output to the log and show its count of steps; returns the exit code."""
    assert process.stdout is not None
    is_terminal, began = sys.stdout.isatty(), build.now()
    shown = began
    with build.log.open("a", encoding="utf-8") as log:
        for line in process.stdout:
            log.write(line)
            log.flush()
            if (step := STEP.match(line)) is None:
                continue
            now, n_done, n_steps = build.now(), int(step[1]), int(step[2])
            left = duration((now - began) * (n_steps / n_done - 1))
            text = f"step {n_done} of {n_steps}, about {left} left"
            if is_terminal:
                print(f"\r\x1b[K{text}", end="", flush=True)
            elif now - shown >= REPORT_SECONDS:
                shown = now
                build.say(text)
    if is_terminal:
        print("\r\x1b[K", end="", flush=True)
    return process.wait()


def failure(build: Build) -> str:
    """The error of a failed compilation: the cause if known, the end of the log, and its path."""
    text = build.log.read_text(encoding="utf-8", errors="replace")
    tools = [f"{build.compiler.cxx} {'.'.join(map(str, build.compiler.version))}"]
    if build.toolkit is not None:
        tools.append(f"nvcc {build.toolkit.release}")
    hint = ""
    if re.search(r"No space left on device", text):
        hint = f"\nthe disk of {build.directory} or of the directory for temporary files is full"
    elif re.search(r"\bKilled\b|cannot allocate memory|out of memory", text, re.IGNORECASE):
        hint = f"\nthe memory was too small for {build.n_jobs} files at a time; try --jobs {max(build.n_jobs // 2, 1)}"
    return f"the compilation failed ({', '.join(tools)}):\n{end_of_log(build.log)}{hint}"


def end_of_log(log: Path) -> str:
    """The last lines of ``log`` and its path; of a failed step, from its beginning on."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    failed = next((index for index, line in enumerate(lines) if line.startswith("FAILED:")), None)
    shown = lines[failed : failed + LAST_LINES] if failed is not None else lines[-LAST_LINES:]
    return "\n".join([*(line[:400] for line in shown), f"log: {log}"])


def stage_libraries(build: Build, home: Path, driver: str, built: float) -> BuiltLibraries:
    """Collect the libraries in a hidden directory below ``home``, to be checked; links stay links.

    ``driver`` is the driver's release, ``built`` the time in seconds since 1970.
    """
    directory = home / "llama" / f".{build.name}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for path in sorted((build.directory / "bin").glob(LIBRARY_NAMES)):
        shutil.copy2(path, directory / path.name, follow_symlinks=False)
    for path in build.toolkit.libraries if build.toolkit is not None else ():
        shutil.copy2(path, directory / path.name)
    staged = BuiltLibraries(
        release=read_pin().release,
        toolkit=build.toolkit.release if build.toolkit is not None else "",
        architectures=build.architectures,
        compiler=f"{build.compiler.cxx} {'.'.join(map(str, build.compiler.version))}",
        driver=driver,
        features=cpu_features(),
        files={path.name: path.stat().st_size for path in sorted(directory.glob(LIBRARY_NAMES))},
        outside=_outside(build.toolkit),
        built=built,
        directory=directory,
    )
    write_built(staged)
    return staged


def _outside(toolkit: Toolkit | None) -> tuple[str, ...]:
    if toolkit is None or toolkit.libraries:
        return ()
    return tuple(str(path.resolve()) for path in (toolkit.cudart, toolkit.cublas))


def place_libraries(staged: BuiltLibraries) -> Path:
    """Give the checked libraries their name; processes that run on an earlier build with that name keep its files."""
    name = staged.directory.name.removeprefix(".")
    target, old = staged.directory.with_name(name), staged.directory.with_name(f".{name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    staged.directory.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    return target
