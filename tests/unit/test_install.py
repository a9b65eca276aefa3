"""tools/install.py: the output of a long build, from lines that pip's log has of one."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from tools.install import BuildProgress, ProgressPrinter

ROOT = Path(__file__).resolve().parents[2]
STAMP = "2026-11-29T11:06:08,114"
OURS = f"{STAMP}   Running command Building editable for pyctl-llama (pyproject.toml)"
LLAMA = f"{STAMP}   Running command Building wheel for llama-cpp-python (pyproject.toml)"

FAKE_PIP = f"""#!{sys.executable}
import pathlib, sys
log = pathlib.Path(sys.argv[sys.argv.index("--log") + 1])
log.write_text("the whole output")
print("pip", *sys.argv[1:])
sys.exit(int(sys.argv[1]))
"""
"""A pip that ends with the exit code of its first argument."""


class Terminal(io.StringIO):
    """A terminal that keeps all that was written to it."""

    def isatty(self) -> bool:
        return True


def finished(n_finished: int, n_files: int) -> str:
    """Return the line of a file that ninja finished."""
    return f"{STAMP}   [{n_finished}/{n_files}] Building CXX object CMakeFiles/a.dir/a.cpp.o"


def test_a_build_has_a_package_and_a_number_of_files() -> None:
    progress = BuildProgress()
    progress.follow([OURS, finished(1, 90), f"{STAMP}   a note of the compiler", finished(2, 90)])
    assert progress.text() == "pyctl-llama: 2 of 90 files compiled"


def test_the_next_package_starts_without_files() -> None:
    progress = BuildProgress()
    progress.follow([OURS, finished(90, 90), LLAMA])
    assert progress.text() == ""
    progress.follow([finished(1, 262)])
    assert progress.text() == "llama-cpp-python: 1 of 262 files compiled"


def test_brackets_in_the_output_of_a_compiler_are_no_files() -> None:
    progress = BuildProgress()
    progress.follow([LLAMA, f"{STAMP}   a.cpp: note: [3/4] of them", f"{STAMP}   [5/6"])
    assert progress.text() == ""


def test_a_file_gets_a_line_for_each_state() -> None:
    progress = BuildProgress()
    output = io.StringIO()
    printer = ProgressPrinter(progress, output)
    for lines in ([OURS], [finished(1, 90)], [], [finished(40, 90)]):
        progress.follow(lines)
        printer.update()
    assert output.getvalue().splitlines() == [
        "    pyctl-llama: 1 of 90 files compiled",
        "    pyctl-llama: 40 of 90 files compiled",
    ]


def test_a_terminal_has_one_line_for_each_package() -> None:
    """A carriage return lets a state replace the one before; pip wrote the start of a line."""
    progress = BuildProgress()
    output = Terminal()
    printer = ProgressPrinter(progress, output)
    for line in (OURS, finished(1, 90), finished(40, 90), LLAMA, finished(7, 262)):
        progress.follow([line])
        printer.update()
    assert output.getvalue() == (
        "\n    pyctl-llama: 1 of 90 files compiled ... "
        "\r    pyctl-llama: 40 of 90 files compiled ... "
        "\n    llama-cpp-python: 7 of 262 files compiled ... "
    )


def run_install(directory: Path, code: int) -> subprocess.CompletedProcess[str]:
    """Run tools/install.py in ``directory`` with a pip that ends with ``code``."""
    pip = directory / "pip"
    pip.write_text(FAKE_PIP, encoding="utf-8")
    pip.chmod(0o700)
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "install.py"), str(pip), str(code), "."],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


def test_pip_gets_the_arguments_and_a_log(tmp_path: Path) -> None:
    done = run_install(tmp_path, 0)
    assert done.returncode == 0
    assert done.stdout == "pip 0 . --log build/install.log\n"


def test_the_start_of_a_line_of_pip_is_not_held_back(tmp_path: Path) -> None:
    """A killed pip loses what it buffered; an unbuffered one wrote it."""
    pip = tmp_path / "pip"
    pip.write_text(
        f"#!{sys.executable}\nimport os, sys\nsys.stdout.write('start')\nos._exit(0)\n",
        encoding="utf-8",
    )
    pip.chmod(0o700)
    command = [sys.executable, str(ROOT / "tools" / "install.py"), str(pip)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "start"


def test_a_failure_of_pip_is_one_of_the_script_and_names_the_log(tmp_path: Path) -> None:
    done = run_install(tmp_path, 3)
    assert done.returncode == 3
    assert done.stdout.splitlines()[1:] == [
        "installing failed; build/install.log has the whole output"
    ]
    assert (tmp_path / "build" / "install.log").read_text(encoding="utf-8") == "the whole output"
