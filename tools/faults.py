"""Plants the faults of `tools.planted_faults`, one at a time, in a copy of the tree: which test catches each.

python -m tools.faults                     all
python -m tools.faults wrong-cell ...      some

The copy is in build/faults, with an environment that sees no other pyctl. Exit code 1 if a fault is not caught, if its
text does not occur once, or if the tests fail without it.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pyctl.module_command import module_command
from tools.planted_faults import FAULTS, Fault

__all__ = ["ROOT", "main"]

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "build" / "faults"
COPY, BUILD, BUILDERS, VENV = HOME / "tree", HOME / "cmake", HOME / "builders", HOME / "venv"
PYTHON = VENV / "bin" / "python"

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", re.MULTILINE)
"""A line of pytest's summary with the id of a test."""

REQUIREMENTS = {"pybind11": "pybind11>=2.13,<4", "cmake": "cmake"}
"""To build the extension; missing ones are installed in BUILDERS."""


class Outcome(NamedTuple):
    """Of a run of pytest: its exit code, the tests that failed, its output and how long it took."""

    code: int
    failed: list[str]
    output: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    by_name = {fault.name: fault for fault in FAULTS}
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description="plant faults and see which test fails")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which faults, all by default")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in by_name]:
        parser.error(f"no fault is called {unknown[0]}")
    make_copy()
    return try_all([by_name[name] for name in options.names] or FAULTS)


def try_all(faults: Sequence[Fault]) -> int:
    """Print a table of what catches each of ``faults``; returns the exit code."""
    without = run(sorted({test for fault in faults for test in fault.tests}))
    if without.code != 0:
        print(without.output, "these tests fail without a fault", sep="\n")
        return 1
    missed = 0
    print("| fault | place | caught by | seconds |\n|---|---|---|---|", flush=True)
    for fault in faults:
        with planted(fault):
            outcome = run(fault.tests)
        found = ", ".join(outcome.failed) or "nothing"
        print(f"| {fault.name} | {fault.place} | {found} | {outcome.seconds:.0f} |", flush=True)
        missed += not outcome.failed
    return 1 if missed else 0


def run(tests: Sequence[str]) -> Outcome:
    """Run ``tests`` in the copy, up to the first one that fails."""
    began = time.monotonic()
    command = [str(PYTHON), "-m", "pytest", "-qx", "-rfE", "--tb=no", "-p", "no:cacheprovider", "--timeout=120", *tests]
    environment = os.environ | {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "", "COLUMNS": "1000"}
    done = subprocess.run(command, cwd=COPY, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    return Outcome(done.returncode, FAILED.findall(done.stdout), output, time.monotonic() - began)


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The copy has ``fault`` meanwhile, and an extension with it. SystemExit if its text does not occur once."""
    path = COPY / fault.place
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: its text occurs {text.count(fault.old)} times in {fault.place}")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    is_native = fault.place.startswith("csrc/")
    try:
        if is_native:
            build_core()
        yield
    finally:
        path.write_text(text, encoding="utf-8")
        if is_native:
            copy_core()


def make_copy() -> None:
    """Have the tree as git sees it in COPY, with the extension that is installed, and an environment for it.

    Files that are the same stay as they are, so that the compiler need not see them again.
    """
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    wanted = {Path(name) for name in names if name and not name.startswith("vendor/") and (ROOT / name).is_file()}
    for name in [path.relative_to(COPY) for path in COPY.rglob("*") if path.is_file()]:
        if name not in wanted and name.parts[0] != "vendor" and name.suffix != ".pyc":
            (COPY / name).unlink()
    for name in wanted:
        if not (COPY / name).exists() or not filecmp.cmp(ROOT / name, COPY / name, shallow=False):
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, COPY / name)
            shutil.copymode(ROOT / name, COPY / name)
    if not (COPY / "vendor").is_symlink():
        (COPY / "vendor").symlink_to(ROOT / "vendor")
    copy_core()
    if not PYTHON.exists():
        subprocess.run([*module_command("venv"), "--without-pip", str(VENV)], check=True)
    # Only the paths: of an editable installation, the hook would lead back to the tree.
    sites = [path for path in sys.path if path.endswith("site-packages")]
    (site,) = VENV.glob("lib/python*/site-packages")
    (site / "copy.pth").write_text("\n".join([str(COPY), *sites]), encoding="utf-8")


def copy_core() -> None:
    """Put the installed extension, and what was compiled with it, into the copy. SystemExit if there is none."""
    found = importlib.util.find_spec("pyctl._core")
    if found is None or found.origin is None:
        raise SystemExit("pyctl's extension is not installed: make install")
    place = Path(found.origin).parent
    copy_modules(place)
    shutil.copytree(place / "lib", COPY / "pyctl" / "lib", dirs_exist_ok=True)


def copy_modules(place: Path) -> None:
    for module in place.glob("_*.so"):
        shutil.copy2(module, COPY / "pyctl" / module.name)


def build_core() -> None:
    """Compile the extension of the copy. SystemExit if that fails."""
    found = {name for name in REQUIREMENTS if shutil.which(name) or importlib.util.find_spec(name)}
    missing = [REQUIREMENTS[name] for name in REQUIREMENTS.keys() - found]
    if missing and not BUILDERS.exists():
        install = [*module_command("pip"), "install", "--quiet", "--target", str(BUILDERS), *missing]
        subprocess.run(install, check=True)
    environment = os.environ | {"PYTHONPATH": str(BUILDERS), "PATH": f"{BUILDERS / 'bin'}:{os.environ['PATH']}"}

    def call(*command: str) -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    pybind11 = call(*module_command("pybind11"), "--cmakedir")
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}"]
    call("cmake", "-S", str(COPY), "-B", str(BUILD), *options)
    call("cmake", "--build", str(BUILD), "--target", "_core", "_drafts", "_pool", "--parallel", str(os.cpu_count()))
    copy_modules(BUILD)


if __name__ == "__main__":
    sys.exit(main())
