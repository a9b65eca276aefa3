"""A picture of `pyctl chat` for the documentation: a real terminal, two starts, and the cache between them.

python -m tools.terminal_picture [--svg docs/chat.svg]      # needs '.[page]'
"""

from __future__ import annotations

import argparse
import os
import pty
import select
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import pyte
from rich.color import ANSI_COLOR_NAMES
from rich.console import Console
from rich.style import Style
from rich.text import Text

from pyctl.models import builtin_model
from pyctl.module_command import module_command

COLUMNS, LINES = 96, 50
PATIENCE_S = 120.0
HARBOUR = "You keep the book of a harbour. " + " ".join(
    f"Berth {i} is for boats of up to {4 + i * 7 % 23} metres." for i in range(1, 401)
)
CHAT = 'pyctl chat -m builtin.gguf -sys "$(cat harbour.txt)" --kv-cache-dir cache'
TALK = (
    (CHAT, "Hello! The code of the north door is 4821.", "My name is Ada, and my sister lives in Bergen."),
    (f"{CHAT} --continue", "What is the code of the north door?"),
)
"""Each start, and what is said after it."""


pyte.graphics.TEXT[2] = "+italics"
"""Pyte has no dim text, and pyctl no italics."""


class Terminal:
    """A screen of COLUMNS by LINES, and the program that writes to it."""

    def __init__(self, place: Path, environment: Mapping[str, str]) -> None:
        self.screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self.screen)
        self._place, self._environment = place, environment

    def run(self, command: str, texts: Sequence[str]) -> None:
        """Type each of ``texts`` at a prompt of ``command``, then leave; TimeoutError if no prompt comes."""
        self._stream.feed(f"$ {command}\r\n".encode())
        program_line = f"{command.replace('pyctl', shlex.join(module_command('pyctl')), 1)} -n 64"
        line = f"stty rows {LINES} columns {COLUMNS}; {program_line}"
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            ["sh", "-c", line], stdin=theirs, stdout=theirs, stderr=theirs, cwd=self._place, env=self._environment
        ) as program:
            os.close(theirs)
            for text in (*texts, "/exit"):
                self._read(ours, until_prompt=True)
                os.write(ours, text.encode() + b"\r")
            self._read(ours, until_prompt=False)
            os.close(ours)
            if program.wait() != 0:
                raise SystemExit(f"pyctl chat ended with {program.returncode}:\n" + "\n".join(self.screen.display))
        self._stream.feed(b"\r\n")

    def _read(self, end: int, *, until_prompt: bool) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            ready, _, _ = select.select([end], [], [], 1.0)
            if not ready:
                if until_prompt and self._line().startswith(">") and self._line().strip(" >") == "":
                    return
                continue
            try:
                data = os.read(end, 65536)
            except OSError:
                return
            self._stream.feed(data)
            if b"\x1b[6n" in data:  # a prompt asks where the cursor is
                cursor = self.screen.cursor
                os.write(end, f"\x1b[{cursor.y + 1};{cursor.x + 1}R".encode())
        raise TimeoutError("no prompt")

    def _line(self) -> str:
        return str(self.screen.display[self.screen.cursor.y])

    def text(self) -> Text:
        """All that the screen shows, with its colours."""
        shown = Text()
        for y in range(LINES):
            cells = [self.screen.buffer[y][x] for x in range(COLUMNS)]
            for (fg, bold, italics), run in groupby(cells, lambda cell: (cell.fg, cell.bold, cell.italics)):
                shown.append("".join(cell.data for cell in run), Style(color=colour(fg), bold=bold, dim=italics))
            shown.rstrip()
            shown.append("\n")
        shown.rstrip()
        return shown


def colour(name: str) -> str | None:
    """Rich's name of a colour of pyte's: a name of ANSI's, or six hexadecimal digits."""
    if name == "default":
        return None
    if name.startswith("bright"):
        return f"bright_{name[6:].replace('brown', 'yellow')}"
    return "yellow" if name == "brown" else name if name.isalpha() and name in ANSI_COLOR_NAMES else f"#{name}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, default=Path("docs/chat.svg"), metavar="FILE")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "builtin.gguf").symlink_to(builtin_model())
        (Path(directory) / "harbour.txt").write_text(HARBOUR, encoding="utf-8")
        environment = {**os.environ, "HOME": directory, "TERM": "xterm-256color", "PYTHONPATH": str(Path.cwd())}
        terminal = Terminal(Path(directory), environment)
        for first, *rest in TALK:
            terminal.run(first, rest)
    console = Console(width=COLUMNS, record=True, highlight=False)
    console.print(terminal.text())
    console.save_svg(str(options.svg), title="pyctl chat")


if __name__ == "__main__":
    main()
