"""The line of a terminal that shows the progress of a prompt."""

from __future__ import annotations

import math
import threading
import time
from typing import TextIO

from rich.console import Console

from pyctl.terminal.conversation import PromptProgress

__all__ = ["PromptLine", "progress_text"]

PAUSE_SECONDS = 0.5
"""The time before the line appears, and between two states of it."""

ERASE = "\r\x1b[2K"


class PromptLine:
    """A line that shows progress on ``file`` if that is a terminal, until it is closed for good;
    then nothing of it is left.

    A thread writes the line every ``pause`` seconds, since a server may be silent for long; nothing
    else writes then.
    """

    def __init__(self, file: TextIO, pause: float = PAUSE_SECONDS) -> None:
        self._console = Console(file=file)
        self._pause = pause
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pyctl-progress", daemon=True)
        self._progress = PromptProgress(0, 0)
        self._told = 0.0

    def show(self, progress: PromptProgress) -> None:
        """Show this text from now on."""
        self._progress = progress
        self._told = time.monotonic()
        shows = self._console.file.isatty() and not self._console.is_dumb_terminal
        if shows and not self._closed.is_set() and self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Erase the line, and show nothing more."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        file = self._console.file
        erase = ""
        while not self._closed.wait(self._pause):
            text = progress_text(self._progress, time.monotonic() - self._told)
            erase = ERASE
            file.write(f"{erase}{text[: self._console.width - 1]}")
            file.flush()
        file.write(erase)
        file.flush()


def progress_text(progress: PromptProgress, seconds: float = 0.0) -> str:
    """Return ``progress``, which was reported that many seconds ago, in one line."""
    if progress.queue_position:
        return f"waiting: number {progress.queue_position} in line"
    n_read = progress.n_read
    n_prompt = progress.n_prompt
    text = f"prompt: {n_read:,} of {n_prompt:,} tokens ({n_read / max(n_prompt, 1):.0%})"
    if not progress.seconds_left:
        return text
    remaining = max(math.ceil(progress.seconds_left - seconds), 1)
    return (
        f"{text}, {remaining} s to go"
        if remaining < 120
        else f"{text}, {remaining / 60.0:.0f} min to go"
    )
