"""`pyctl setup`: llama.cpp for this machine's card, from a release or compiled here, in its own
directory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pyctl.cli.command_parser import CommandParser
from pyctl.cli.setup_check import check_libraries
from pyctl.errors import ConfigError
from pyctl.machine.libraries import (
    BuiltLibraries,
    build_home,
    capability,
    choose,
    cpu_features,
    data_home,
    fits,
    libraries_at,
)
from pyctl.machine.pin import read_pin
from pyctl.machine.probe import Machine, free_bytes, probe_machine
from pyctl.setup.build import (
    Build,
    build_lock,
    compile_extension,
    compile_libraries,
    place_libraries,
    stage_libraries,
    stage_release,
)
from pyctl.setup.plan import (
    BuildPlan,
    check_compiler,
    check_room,
    describe,
    describe_build,
    jobs_for,
    make_plan,
    parse_architectures,
)
from pyctl.setup.release_files import (
    ReleaseFile,
    UnfitError,
    fetch,
    find_cuda_file,
    release_place,
    unpack,
    wheel_libraries,
)
from pyctl.setup.source import open_release, pip_command
from pyctl.setup.toolkit import install_toolkit, install_tools, install_wheels

__all__ = ["run_setup"]

MIB = 2**20


def run_setup(
    argv: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    look: Callable[[Mapping[str, str]], Machine] = probe_machine,
) -> int:
    """Look, print the findings, build, check; return the exit code. Raises ConfigError if it cannot
    be done.
    """
    arguments = _parser().parse_args(argv)
    architectures = parse_architectures(arguments.arch) if arguments.arch else ()
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ConfigError("--jobs must be at least 1")
    directory = Path(arguments.dir).expanduser().resolve() if arguments.dir else None
    home, work = (
        (directory, directory / "setup")
        if directory is not None
        else (data_home(environ), build_home(environ))
    )
    if arguments.pinned:
        choose(home, "")
        print(
            f"from its next start on, pyctl uses llama-cpp-python {read_pin().release}, for which "
            "it was made"
        )
        return 0
    machine = look(environ)
    plan = make_plan(machine, architectures, cpu=arguments.cpu)
    if not plan.is_needed and arguments.llama_cpp:
        plan = BuildPlan(
            "for the CPU, as this machine has no card that llama.cpp uses through CUDA"
        )
    if not plan.is_needed:
        from pyctl.llama.library.extension import (
            describe_missing,
        )  # tries the modules, so that no start waits for that

        print("\n".join([plan.why, *describe_missing()]))
        return 0
    print(describe(machine))
    try:
        file = _ready_file(plan, arguments, environ)
        return _set_up(machine, plan, home, work, arguments, file)
    except OSError as error:
        raise ConfigError(f"{error.filename or work}: {error.strerror or error}") from error
    finally:
        if directory is not None and (directory / "llama").is_dir():
            print(f"pyctl uses these libraries where PYCTL_LIBS={directory} is set")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of `pyctl setup`."""
    parser = CommandParser(
        prog="pyctl setup",
        description="Get llama.cpp for this machine's NVIDIA card: from a release of pyctl, or "
        "compiled here if that does not serve the card. CUDA comes from PyPI. pyctl finds the "
        "result at its next start. An interrupted build resumes where it stopped.",
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--cpu", action="store_true", help="build for the CPU, with all features that it has"
    )
    target.add_argument(
        "--arch", metavar="LIST", help="compute capabilities to build for, such as 86,89"
    )
    parser.add_argument("--jobs", "-j", type=int, metavar="N", help="compilers at a time")
    parser.add_argument(
        "--release",
        metavar="DIR|URL",
        help="take the compiled file from this release (default: PYCTL_RELEASE, or where pyctl "
        "was installed from); "
        "none: compile",
    )
    parser.add_argument(
        "--dir", metavar="DIR", help="place for everything, to be named by PYCTL_LIBS afterwards"
    )
    release = parser.add_mutually_exclusive_group()
    release.add_argument(
        "--llama-cpp",
        metavar="VERSION|DIR",
        help="use another release of llama-cpp-python, or a source tree or archive of it or of "
        "llama.cpp, with those "
        "parts of the extension that fit it",
    )
    release.add_argument(
        "--pinned", action="store_true", help="go back to the release for which pyctl was made"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and change nothing")
    parser.add_argument("--yes", "-y", action="store_true", help="answer yes to all questions")
    return parser


def _ready_file(
    plan: BuildPlan, arguments: argparse.Namespace, environ: Mapping[str, str]
) -> ReleaseFile | None:
    """Return the compiled file of the release that was named, or that pyctl was installed from."""
    release = arguments.release or release_place(environ)
    if not release or release == "none" or not plan.architectures or arguments.llama_cpp:
        return None
    try:
        return find_cuda_file(release)
    except ConfigError as error:
        if arguments.release or "PYCTL_RELEASE" in environ:
            raise ConfigError(f"{error}; to compile instead: pyctl setup --release none") from error
        print(f"no compiled file, {error}; --release names another place")
        return None


def _set_up(
    machine: Machine,
    plan: BuildPlan,
    home: Path,
    work: Path,
    arguments: argparse.Namespace,
    file: ReleaseFile | None,
) -> int:
    """Put the libraries of ``plan`` into ``home``, from ``file`` or a build in ``work``; return the
    exit code.
    """
    uses_gpu = bool(machine.cards and plan.architectures)
    existing = _existing(plan, home) if not arguments.llama_cpp else None
    if existing is not None:
        print(f"already there: {existing.directory}")
        if not arguments.dry_run:
            print(check_libraries(existing, uses_gpu=uses_gpu))
        return 0
    if not _agreed(machine, plan, work, arguments, file):
        return 0 if arguments.dry_run else 1
    began = time.monotonic()
    with build_lock(work):
        built = None
        if file is not None:
            try:
                built = _use_release(plan, home, work, file)
            except UnfitError as error:
                print(error)
                if not _agreed(machine, plan, work, arguments):
                    return 1
        built = built or _build(machine, plan, home, work, arguments)
        print(check_libraries(built, uses_gpu=uses_gpu))
        target = place_libraries(built)
        if arguments.llama_cpp:
            choose(home, target.name)
        shutil.rmtree(work)
    n_mib = sum(built.files.values()) / MIB
    print(f"done in {(time.monotonic() - began) / 60:.1f} minutes: {target} ({n_mib:.0f} MiB)")
    return 0


def _agreed(
    machine: Machine,
    plan: BuildPlan,
    work: Path,
    arguments: argparse.Namespace,
    file: ReleaseFile | None = None,
) -> bool:
    """Print the steps, and return whether the user confirms. Raises ConfigError if it cannot be
    done.
    """
    if file is not None:
        print(f"take:  {file.url}, and CUDA from PyPI")
    else:
        print(describe_build(check_compiler(machine), plan, jobs_for(machine, arguments.jobs or 0)))
    entries = (path.lstat() for path in work.rglob("*") if not path.is_dir())
    check_room(plan, free_bytes(work) + sum(entry.st_size for entry in entries), work)
    if arguments.dry_run:
        print("dry run: nothing was changed")
        return False
    if arguments.yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError("this needs an answer, and there is no terminal to give it; pass --yes")
    return input("continue? [Y/n] ").strip().lower() in ("", "y", "yes")


def _use_release(plan: BuildPlan, home: Path, work: Path, file: ReleaseFile) -> BuiltLibraries:
    """Return the libraries of the release's file and of NVIDIA's wheels. Raises UnfitError if the
    file does not serve the cards.
    """
    bindings = wheel_libraries()
    print("fetching", flush=True)
    archive = fetch(file, work)
    unpacked = archive.with_name("unpacked")
    shutil.rmtree(unpacked, ignore_errors=True)
    manifest = unpack(archive, unpacked, plan.architectures)
    nvidia = work / f"nvidia-{manifest.toolkit}"
    install_wheels(pip_command(work), manifest.requirements, nvidia)
    return stage_release(manifest, (bindings, unpacked), nvidia / "nvidia" / "cu13" / "lib", home)


def _build(
    machine: Machine, plan: BuildPlan, home: Path, work: Path, arguments: argparse.Namespace
) -> BuiltLibraries:
    """Fetch missing sources, compile, and collect the libraries."""
    compiler = check_compiler(machine)
    pip = pip_command(work)
    print("fetching the tools for the build", flush=True)
    release = open_release(pip, arguments.llama_cpp or "", work)
    tools = install_tools(pip, work)
    toolkit = install_toolkit(pip, work, compiler) if plan.architectures else None
    n_jobs = jobs_for(machine, arguments.jobs or 0)
    own = release if arguments.llama_cpp else None
    build = Build(work, compiler, tools, n_jobs, toolkit, plan.architectures, own)
    compile_libraries(build, release.tree)
    missing = compile_extension(build, own) if own is not None else {}
    return stage_libraries(build, home, time.time(), missing)


def _existing(plan: BuildPlan, home: Path) -> BuiltLibraries | None:
    """Return a build for the purpose of ``plan``."""
    release = read_pin().release
    features = cpu_features()
    capabilities = [*map(capability, plan.architectures)]
    fitting = (
        built
        for built in libraries_at(home)
        if not built.digests and fits(built, release, capabilities, features)
    )
    return next(
        (built for built in fitting if bool(built.architectures) == bool(capabilities)), None
    )
