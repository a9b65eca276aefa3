"""One line of a terminal that says how far a prompt is read."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console

from pyctl.terminal.conversation import PromptProgress

__all__ = ["PromptLine", "progress_text"]

PAUSE_SECONDS = 0.5
"""Before the line appears, and between two states of it."""

ERASE = "\r\x1b[2K"


class PromptLine:
    """Shows progress on ``file`` if that is a terminal, for the time of a ``with`` block, and leaves nothing of it.

    A thread writes the line, since a server may be silent for long; nothing else writes to the terminal meanwhile.
    """

    def __init__(
        self, file: TextIO | None, pause: float = PAUSE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        console = Console(file=file) if file is not None and file.isatty() else None
        self._console = console if console is not None and not console.is_dumb_terminal else None
        self._pause, self._clock = pause, clock
        self._progress, self._told = PromptProgress(0, 0), 0.0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> PromptLine:
        self._closed.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, progress: PromptProgress) -> None:
        """Say this from now on, until the block is closed."""
        self._progress, self._told = progress, self._clock()
        if self._thread is None and not self._closed.is_set() and self._console is not None:
            self._thread = threading.Thread(target=self._run, args=(self._console,), name="pyctl-progress", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Erase the line, and show no other in this block."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, console: Console) -> None:
        erase = ""
        while not self._closed.wait(self._pause):
            text = progress_text(self._progress, self._clock() - self._told)
            console.file.write(f"{ERASE}{text[: console.width - 1]}")
            console.file.flush()
            erase = ERASE
        console.file.write(erase)
        console.file.flush()


def progress_text(progress: PromptProgress, seconds: float = 0.0) -> str:
    """``progress``, which was reported so many seconds ago, in one line."""
    n_read, n_prompt = progress.n_read, progress.n_prompt
    text = f"prompt: {n_read:,} of {n_prompt:,} tokens ({n_read / max(n_prompt, 1):.0%})"
    if progress.seconds_left <= 0.0:
        return text
    left = max(math.ceil(progress.seconds_left - seconds), 1)
    return f"{text}, {left} s to go" if left < 120 else f"{text}, {left / 60.0:.0f} min to go"
