"""Prepare a machine for `bench.gpu.measure`: libraries, llama-server, the extension, and full-size
models.

    python -m bench.gpu.prepare /data/gpu                 # bare machine: CUDA, compiler, network
    python -m bench.gpu.prepare /data/gpu --source SDIST  # without network: an sdist
    python -m bench.gpu.prepare /data/gpu --libs DIR           # libraries that were built before
    python -m bench.gpu.prepare /data/gpu --cpu --models tiny-hybrid
    python -m bench.gpu.prepare /data/gpu --models 27b-nextn 35b-a3b-nextn   # with heads for drafts
    python -m bench.gpu.prepare /data/gpu --models gpt-oss-20b gemma4-26b-a4b qwen4exp-20b-a6b

llama.cpp comes from the source that vendor/llama.cpp/pin.txt names; this extension and llama-server
use the same libraries. Everything goes to the given directory, the extension also into pyctl/.
Existing parts are kept. Models are written in the background, and measure.py waits for them.
`DIR/python` runs Python with all of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from bench.gpu.machine import Cuda, compilers, find_cuda
from pyctl.errors import ConfigError
from pyctl.machine.pin import read_pin
from pyctl.processes.module_command import module_command
from pyctl.setup.source import Release, open_release, pip_command

REPOSITORY = Path(__file__).resolve().parents[2]
VENDOR = REPOSITORY / "vendor" / "llama.cpp"
SERVER_FILES = ("llama-server", "libllama-server-impl.so*", "libllama-common.so*", "libmtmd.so*")
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:7.1f} s  {text}", flush=True)


def log_of(place: Path, name: str) -> Path:
    (place / "logs").mkdir(parents=True, exist_ok=True)
    return place / "logs" / f"{name}.log"


def run(command: Sequence[str | Path], log: Path, environment: dict[str, str]) -> None:
    """Run a command with its output in ``log``; SystemExit with the end of it on failure."""
    with log.open("ab") as out:
        code = subprocess.run(
            [str(part) for part in command], stdout=out, stderr=out, env=environment, check=False
        )
    if code.returncode != 0:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if re.search(r"error|FAILED|fatal", line, re.IGNORECASE)][
            :15
        ]
        raise SystemExit(
            "\n".join(
                [f"failed: {' '.join(map(str, command))}", *errors, *lines[-8:], f"log: {log}"]
            )
        )


def requirements() -> dict[str, str]:
    """Return import name to requirement of everything pyctl needs at run time, and of what builds
    it.
    """
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.findall(r'"([^"]+)"', text.partition("\ndependencies = [")[2].partition("\n]")[0])
    needed = [*listed, "pybind11>=2.13", "diskcache>=5.6", "typing-extensions>=4.5"]
    named = {re.split(r"[<>=~!\[]", item)[0].replace("-", "_"): item for item in needed}
    del named["llama_cpp_python"]
    del named["pillow"]  # WebP images alone need it
    named["markdown_it"] = named.pop("markdown_it_py")  # the one that is imported by another name
    return named


def install_packages(place: Path, wheels: Path | None) -> None:
    """Put the packages into site/ that this Python lacks: from ``wheels`` if given, else through
    pip. SystemExit if that fails.
    """
    missing = [item for name, item in requirements().items() if not present(name, place / "site")]
    if not missing:
        return
    command = [
        *module_command("pip"),
        "install",
        "--disable-pip-version-check",
        "--quiet",
        "--no-compile",
    ]
    command += ["--target", str(place / "site")]
    if wheels is not None:
        files = sorted(str(path) for path in wheels.glob("*.whl"))
        run(
            [*command, "--no-index", "--no-deps", "--upgrade", *files],
            log_of(place, "pip"),
            dict(os.environ),
        )
    else:
        run([*command, *missing], log_of(place, "pip"), dict(os.environ))
    lacking = [item for name, item in requirements().items() if not present(name, place / "site")]
    if lacking:
        raise SystemExit(f"still missing after pip: {', '.join(lacking)}")
    say(f"Python packages installed: {', '.join(missing)}")


def present(name: str, site: Path) -> bool:
    return (
        (site / name).exists()
        or (site / f"{name}.py").exists()
        or importlib.util.find_spec(name) is not None
    )


def open_source(place: Path, given: Path | None) -> Release:
    """Return the release that pin.txt names: ``given``, or from pip. Its headers go to vendor/, its
    bindings to site/.

    SystemExit if it is another one.
    """
    try:
        release = open_release(pip_command(place) if given is None else [], str(given or ""), place)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    if release.version != read_pin().release or release.digest not in ("", read_pin().digest):
        raise SystemExit(f"{given} is not the release that vendor/llama.cpp/pin.txt names")
    run(
        [sys.executable, VENDOR / "unpack.py", "--from", release.tree],
        log_of(place, "unpack"),
        dict(os.environ),
    )
    ignored = shutil.ignore_patterns("*.so*", "__pycache__")
    shutil.copytree(
        release.bindings, place / "site" / "llama_cpp", dirs_exist_ok=True, ignore=ignored
    )
    return release


def build_libraries(
    place: Path, source: Release | None, options: argparse.Namespace, cuda: Cuda | None
) -> None:
    """Build libllama, libggml* and llama-server into lib/; with --libs only the server. SystemExit
    without ``source``.
    """
    (place / "lib").mkdir(parents=True, exist_ok=True)
    if options.libs is not None and not (place / "lib" / "libllama.so").exists():
        copy(sorted(options.libs.glob("lib*.so*")), place / "lib")
        copy(sorted(options.libs.glob("llama-server")), place / "lib")
    if (place / "lib" / "libllama.so").exists() and (
        options.no_server or (place / "lib" / "llama-server").exists()
    ):
        return say("libraries and llama-server are there")
    if source is None:
        raise SystemExit("nothing to build llama-server from: give --source, or --no-server")
    own = options.libs is None
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "ON",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_UI": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_BUILD_APP": "OFF",
        "LLAMA_OPENSSL": "OFF",
        "LLAMA_BUILD_MTMD": "OFF",
        "CMAKE_INSTALL_RPATH": "$ORIGIN",
        "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    }
    environment = {**os.environ, **compilers()}
    if own and cuda is not None:
        settings |= {
            "GGML_CUDA": "ON",
            "GGML_CUDA_NCCL": "OFF",
            "CMAKE_CUDA_ARCHITECTURES": cuda.architectures,
        }
        settings["CMAKE_CUDA_HOST_COMPILER"] = environment["CUDAHOSTCXX"]
        environment |= cuda.environment
    defined = [f"-D{name}={value}" for name, value in settings.items()]
    extra = cuda.options if own and cuda is not None else ()
    log = log_of(place, "libraries")
    run(
        ["cmake", "-S", source.tree, "-B", place / "build", *generator(), *defined, *extra],
        log,
        environment,
    )
    targets = ["llama", "ggml", "mtmd"] * own + ["llama-server"] * (not options.no_server)
    run(
        ["cmake", "--build", place / "build", "-j", str(options.jobs), "--target", *targets],
        log,
        environment,
    )
    # Libraries that were given are never replaced by the ones that the server was linked with.
    patterns = SERVER_FILES if not own else (*SERVER_FILES, "lib*.so*")
    built = {path for pattern in patterns for path in (place / "build" / "bin").glob(pattern)}
    copy(sorted(built), place / "lib")
    say(
        "built libllama, ggml and llama-server"
        if own
        else "built llama-server for the given libraries"
    )


def generator() -> list[str]:
    return ["-G", "Ninja"] if shutil.which("ninja") else []


def copy(files: Sequence[Path], target: Path) -> None:
    for path in files:
        (target / path.name).unlink(missing_ok=True)
        shutil.copy2(path, target / path.name, follow_symlinks=False)


def build_extension(place: Path, environment: dict[str, str]) -> None:
    """Build pyctl/_*.so; cmake and ninja rebuild the changed parts."""
    query = [*module_command("pybind11"), "--cmakedir"]
    directory = subprocess.run(
        query, capture_output=True, text=True, env=environment, check=True
    ).stdout.strip()
    log = log_of(place, "extension")
    command: list[str | Path] = ["cmake", "-S", REPOSITORY, "-B", place / "extension", *generator()]
    command += [
        "-DCMAKE_BUILD_TYPE=Release",
        f"-Dpybind11_DIR={directory}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    run(command, log, {**environment, **compilers()})
    run(["cmake", "--build", place / "extension"], log, environment)
    for path in (place / "extension").glob("_*.so"):
        temporary = REPOSITORY / "pyctl" / f".{path.name}.tmp"
        shutil.copy2(path, temporary)
        temporary.replace(REPOSITORY / "pyctl" / path.name)
    say("built the extension")


def write_models(
    place: Path, shapes: Sequence[str], environment: dict[str, str]
) -> dict[str, Path]:
    """Start writing the models that are not there yet; each file appears whole, and its writer's id
    before it.
    """
    (place / "models").mkdir(parents=True, exist_ok=True)
    paths = {shape: place / "models" / f"{shape}.gguf" for shape in shapes}
    for shape, path in paths.items():
        pid = path.with_suffix(".pid")
        if path.exists() or (pid.exists() and Path(f"/proc/{pid.read_text()}").exists()):
            continue
        command = [
            "nice",
            "-n",
            "5",
            *module_command("tools.generator"),
            "--shape",
            shape,
            "-o",
            str(path),
        ]
        with log_of(place, f"model-{shape}").open("wb") as out:
            writer = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                env=environment,
                cwd=REPOSITORY,
                start_new_session=True,
            )
        pid.write_text(str(writer.pid))
        say(f"writing {path} in the background")
    return paths


def environment_of(place: Path, cuda: Cuda | None) -> dict[str, str]:
    """Return the variables with which Python and llama-server find everything."""
    libraries = [place / "lib", *(cuda.library_dirs if cuda is not None else ())]
    paths = {"PYTHONPATH": [place / "site", REPOSITORY], "LD_LIBRARY_PATH": libraries}
    joined = {}
    for name, first in paths.items():
        rest = [
            part
            for part in os.environ.get(name, "").split(os.pathsep)
            if part and Path(part) not in first
        ]
        joined[name] = os.pathsep.join([*map(str, first), *rest])
    return {**joined, "LLAMA_CPP_LIB_PATH": str(place / "lib"), "MTMD_CPP_LIB": str(place / "lib")}


def finish(
    place: Path, variables: dict[str, str], models: dict[str, Path], *, server: bool, gpu: bool
) -> None:
    """Check that both programs start, or SystemExit, and write `python` and prepared.json."""
    environment = {**os.environ, **variables}
    check = "import pyctl.cli; from pyctl.llama.library.extension import build_version"
    check += "; from pyctl.llama.library.native import HostBuffer"
    check += "; print(build_version(), 'pinned', HostBuffer.open(2**28, 2**26)); HostBuffer.stop()"
    command = [sys.executable, "-c", check]
    shown = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=REPOSITORY, check=False
    )
    if shown.returncode != 0:
        raise SystemExit(f"pyctl does not load:\n{shown.stderr}")
    say(shown.stdout.strip())
    if gpu and shown.stdout.split()[-1] != "True":
        raise SystemExit("these libraries find no GPU: see nvidia-smi, or give --cpu")
    binary = place / "lib" / "llama-server"
    if server:
        shown = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, env=environment, check=False
        )
        if shown.returncode != 0:
            raise SystemExit(f"llama-server does not start:\n{shown.stderr}")
        say(f"llama-server {(shown.stdout + shown.stderr).strip().splitlines()[-2:]}")
    lines = [f'export {name}="{value}"' for name, value in variables.items()]
    (place / "python").write_text(
        "\n".join(["#!/bin/sh", *lines, f'exec "{sys.executable}" "$@"', ""]), encoding="utf-8"
    )
    (place / "python").chmod(0o755)
    prepared = {
        "environment": variables,
        "llama_server": str(binary) if server else None,
        "models": {shape: str(path) for shape, path in models.items()},
    }
    (place / "prepared.json").write_text(json.dumps(prepared, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Build everything that bench.gpu needs into the directory: packages, libraries, extension,
    models, and a `python` that runs in its environment. Libraries and extension are built at the
    same time.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cpu", action="store_true", help="build without CUDA")
    parser.add_argument(
        "--source",
        type=Path,
        metavar="PATH",
        help="llama-cpp-python's sdist, or its tree, unpacked",
    )
    parser.add_argument(
        "--libs",
        type=Path,
        metavar="DIR",
        help="use these libraries, and llama-server if it is there",
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="directory of missing Python packages"
    )
    parser.add_argument("--no-server", action="store_true", help="do without llama-server")
    parser.add_argument("--models", nargs="*", default=["27b", "35b-a3b"], metavar="SHAPE")
    parser.add_argument("--arch", help="CMAKE_CUDA_ARCHITECTURES; default: this machine's GPU")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 2)
    options = parser.parse_args()
    place = options.directory.resolve()
    (place / "site").mkdir(parents=True, exist_ok=True)
    cuda = None if options.cpu else find_cuda(options.arch, build=options.libs is None)
    variables = environment_of(place, cuda)
    environment = {**os.environ, **variables}
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        os.environ[name] = variables[name]

    install_packages(place, options.wheels)
    complete = options.libs is not None and (
        options.no_server or (options.libs / "llama-server").exists()
    )
    headers = (VENDOR / "unpacked.txt").exists()
    source = (
        None
        if complete and headers and options.source is None
        else open_source(place, options.source)
    )
    jobs: tuple[Callable[[], None], ...] = (
        lambda: build_libraries(place, source, options, cuda),
        lambda: build_extension(place, environment),
    )
    with ThreadPoolExecutor() as pool:
        futures: list[Future[None]] = [pool.submit(job) for job in jobs]
    for future in futures:
        future.result()
    models = write_models(
        place, options.models, environment
    )  # needs llama.cpp for the tensors of some
    finish(place, variables, models, server=not options.no_server, gpu=not options.cpu)
    say(f"done; next: {place}/python -m bench.gpu.measure {place}")


if __name__ == "__main__":
    main()
