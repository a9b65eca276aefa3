"""Runs `pip install`, and reports how many files its compilers have finished.

    make serve    # runs: .venv/bin/python tools/install.py .venv/bin/pip install --editable .

pip hides the output of a build, which takes minutes for llama.cpp. Its log has the lines of ninja,
`[12/262] ...`, as they come.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

__all__ = ["BuildProgress", "main"]

LOG = Path("build") / "install.log"
TERMINAL_PERIOD = 1.0
"""Seconds between two states of the line on a terminal."""

FILE_PERIOD = 30.0
"""Seconds between two lines in a file, such as a log of CI."""

PACKAGE = re.compile(r"Running command Building \w+ for ([\w.-]+)")
FINISHED = re.compile(r"\S+ +\[(\d+)/(\d+)\] ")
"""ninja's line behind the log's time: files that are finished, and all files of this package."""


class BuildProgress:
    """The state of the build that pip's log describes: the package, and its files."""

    def __init__(self) -> None:
        self.package = ""
        self.n_finished = 0
        self.n_files = 0

    def follow(self, lines: Iterable[str]) -> None:
        """Take the next lines of the log."""
        for line in lines:
            if package := PACKAGE.search(line):
                self.package = package[1]
                self.n_finished = 0
            elif finished := FINISHED.match(line):
                self.n_finished = int(finished[1])
                self.n_files = int(finished[2])

    def text(self) -> str:
        """Return the state in words, "" while no compiler has finished a file."""
        if not self.n_finished:
            return ""
        return f"{self.package}: {self.n_finished} of {self.n_files} files compiled"


class ProgressPrinter:
    """The last line of the output: on a terminal each state replaces the one before it."""

    def __init__(self, progress: BuildProgress, output: TextIO) -> None:
        self._progress = progress
        self._output = output
        self._is_terminal = output.isatty()
        self._printed = ""
        self._package = ""
        self.period = TERMINAL_PERIOD if self._is_terminal else FILE_PERIOD

    def update(self) -> None:
        """Print the state if it is another one than before."""
        text = self._progress.text()
        if not text or text == self._printed:
            return
        if self._is_terminal:
            # pip ends its own line, and later this one, with "done" and the line feed.
            start = "\r" if self._package == self._progress.package else "\n"
            self._output.write(f"{start}    {text} ... ")
        else:
            self._output.write(f"    {text}\n")
        self._output.flush()
        self._printed = text
        self._package = self._progress.package


def main(argv: Sequence[str], output: TextIO = sys.stdout) -> int:
    """Run the command of pip in ``argv``, and return its exit code."""
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("", encoding="utf-8")
    command = [*argv, "--log", str(LOG)]
    # Otherwise the start of a line, "Building wheel for .. ", would follow the progress below it.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    progress = BuildProgress()
    printer = ProgressPrinter(progress, output)
    with (
        LOG.open(encoding="utf-8", errors="replace") as log,
        subprocess.Popen(command, env=environment) as pip,
    ):
        try:
            code = wait(pip, log, progress, printer)
        except KeyboardInterrupt:
            # The terminal sends Ctrl-C to pip as well, which reports it.
            return 130
    if code:
        output.write(f"installing failed; {LOG} has the whole output\n")
    return code


def wait(
    pip: subprocess.Popen[bytes], log: TextIO, progress: BuildProgress, printer: ProgressPrinter
) -> int:
    """Print the progress until pip ends, and return its exit code."""
    while True:
        try:
            return pip.wait(printer.period)
        except subprocess.TimeoutExpired:
            progress.follow(log)
            printer.update()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
