"""Where the log goes and how much of it; and the loading bar, which shares the terminal with it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from pyctl.cli.settings import LogSettings
from pyctl.errors import ConfigError

__all__ = ["LoadProgress", "start_log"]

_LOG_LEVELS = {-1: logging.CRITICAL + 1, 0: logging.CRITICAL, 1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO}

log = logging.getLogger("pyctl")


def start_log(settings: LogSettings, warnings: Sequence[str]) -> None:
    """Send the log of everything to stderr and a file if there is one, and begin it with ``warnings``."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if settings.log_file:
        try:
            handlers.append(logging.FileHandler(settings.log_file, encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot write --log-file {settings.log_file}: {error.strerror}") from error
    logging.basicConfig(
        level=_LOG_LEVELS.get(settings.verbosity, logging.DEBUG),
        format="%(asctime)s %(message)s" if settings.timestamps else "%(message)s",
        datefmt="%H:%M:%S",
        handlers=handlers,
    )
    # Libraries have a line for each of their own steps.
    for name in ("httpx", "httpx2", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if settings.verbosity <= 3:
        logging.getLogger("llama.cpp").setLevel(logging.ERROR)
    for warning in warnings:
        log.warning("%s", warning)


LINE_SECONDS = 5.0

"""Between two lines of the log; a model that is loaded sooner gets none."""


class LoadProgress:
    """Shows fractions from 0 to 1 of loading ``path``: the bar within a ``with`` block, behind it lines only."""

    def __init__(self, path: str) -> None:
        self._name = os.path.basename(path)
        console = Console(stderr=True)
        columns = (TextColumn("loading {task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(self._name, total=1.0)
        self._has_bar = False
        self._next_line = time.monotonic() + LINE_SECONDS

    def show(self, fraction: float) -> None:
        """The loading has come to ``fraction``."""
        if self._has_bar:
            self._bar.start()  # only now: what is said before has the terminal for itself
            self._bar.update(self._task, completed=fraction)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            log.info("loading %s: %.0f %%", self._name, fraction * 100)

    def __enter__(self) -> LoadProgress:
        self._has_bar = not self._bar.disable
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_bar = False
        self._bar.stop()
