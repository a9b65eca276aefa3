"""Tests on every Python that pyctl supports, each in its own environment: what `make matrix` runs.

    python -m tools.matrix                              # every one that this machine has
    python -m tools.matrix 3.13 --stages model smoke

Interpreters are those on PATH, and pyenv's. Each stage is a target of the Makefile, run with the
environment build/matrix/VERSION, where `install` compiles the extension for that Python. A Python
that is missing counts as failed if it was named. The others run whatever fails; exits with 1 if
anything did.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
STAGES = ("unit", "model", "smoke", "soak")
FAILED = "FAILED"
CHECK = """
import ensurepip, os, sysconfig
os.stat(sysconfig.get_path("include") + "/Python.h")
print(sysconfig.get_python_version())
"""
"""Prints the minor version of a Python that can make an environment and compile an extension."""

RESULT = re.compile(
    r"(\d+ (?:failed|passed|skipped|error|deselected).*?) in [\d.]+s|(violations)\W+(\d+)\b"
)
"""The last line of pytest, or the row of a soak's table."""


def interpreter(version: str) -> str | None:
    """Return a Python of that minor version, such as "3.13", that passes CHECK: pyenv has commands
    that do not even start.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [
        shutil.which(f"python{version}"),
        *pyenv.glob(f"versions/{version}.*/bin/python{version}"),
    ]
    for each in map(str, filter(None, found)):
        done = subprocess.run([each, "-c", CHECK], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return each
    return None


def run(target: str, version: str, python: str) -> str:
    """Run a target of the Makefile in the environment of ``version``; a cell of the table, which
    starts with FAILED if it did not succeed.
    """
    variables = [f"VENV=build/matrix/{version}", f"PYTHON={python}", "EXTRAS=test"]
    command = ["make", "--no-print-directory", target, *variables]
    result = ""
    print(f"Python {version}: {target}", flush=True)
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if found := RESULT.search(line):
                result = found[1] or f"{found[3]} {found[2]}"
    return result or "done" if process.returncode == 0 else f"{FAILED} {result}".strip()


def row(version: str, stages: Sequence[str], missing: str) -> list[str]:
    """Return the cells of one Python; ``missing`` is the first one if there is no such
    interpreter.
    """
    python = interpreter(version)
    if python is None:
        print(f"Python {version}: none with venv and headers, neither on PATH nor in pyenv")
        return [version, missing, *("" for _ in stages), ""]
    began = time.monotonic()
    cells = [run("install", version, python)]
    installed = not cells[0].startswith(FAILED)
    cells += [run(target, version, python) if installed else "" for target in stages]
    return [version, *cells, f"{(time.monotonic() - began) / 60:.1f}"]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return the lines of a table whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(" | ".join(map(str.ljust, each, widths)).rstrip() for each in rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row per Python: the result of each stage, and minutes. SystemExit if one failed, or
    if a Python named without --optional is missing.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pythons", nargs="*", metavar="VERSION", help=f"such as 3.13; default: {', '.join(PYTHONS)}"
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument(
        "--optional", action="store_true", help="skip a Python that is missing, even if it is named"
    )
    options = parser.parse_args(argv)
    missing = (
        f"{FAILED} missing" if options.pythons and not options.optional else "skipped: missing"
    )
    rows = [row(version, options.stages, missing) for version in options.pythons or PYTHONS]
    print(table([["Python", "install", *options.stages, "minutes"], *rows]))
    if any(cell.startswith(FAILED) for each in rows for cell in each):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
