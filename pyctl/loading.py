"""How far loading a model has come, for people: a bar on a terminal, elsewhere a line of the log now and then."""

from __future__ import annotations

import logging
import os
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

__all__ = ["LoadProgress"]

LINE_SECONDS = 5.0
"""Between two lines of the log; a model that is loaded sooner gets none."""

log = logging.getLogger(__name__)


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
