"""The log: its target and level; and the progress of a load, which shares the terminal with it."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyctl.errors import ConfigError
from pyctl.files.atomic_file import open_private
from pyctl.settings.convert import integer
from pyctl.settings.setting import LOG, Flag
from pyctl.text import clean, one_line

__all__ = ["VERBOSE", "LoadProgress", "LogSettings", "start_log"]

VERBOSE = 10
"""The level from which replies show their sampled tokens, as llama-server's do."""

_LOG_LEVELS = {
    -1: logging.CRITICAL + 1,
    0: logging.CRITICAL,
    1: logging.ERROR,
    2: logging.WARNING,
    3: logging.INFO,
}

log = logging.getLogger("pyctl")


@dataclass(frozen=True)
class LogSettings:
    """The amount of logging; -1 is nothing, and the lines also go to ``log_file``."""

    verbosity: int = LOG.flag(
        3,
        "-lv --verbosity --log-verbosity",
        "1 errors, 2 warnings, 3 information, 4 trace, 5 all",
        integer(-1),
        "LLAMA_ARG_LOG_VERBOSITY",
        shown="3, in chat 2",
        also=(
            Flag(
                "-v --verbose --log-verbose",
                "log everything; replies include debugging fields",
                const=VERBOSE,
            ),
            Flag("--log-disable", "log nothing", const=-1),
        ),
    )
    log_file: str = LOG.flag(
        "", "--log-file", "also write the log to this file", str, "LLAMA_ARG_LOG_FILE", "FILE"
    )
    timestamps: bool = LOG.flag(
        True,
        "--log-timestamps",
        "start each line with the time",
        None,
        "LLAMA_ARG_LOG_TIMESTAMPS",
        off="--no-log-timestamps",
    )


def start_log(settings: LogSettings, warnings: Sequence[str]) -> None:
    """Log to stderr and ``log_file``, ``warnings`` first. Raises ConfigError if that file cannot be
    written.
    """
    screen = logging.StreamHandler(sys.stderr)
    handlers: list[logging.Handler] = [screen]
    if settings.log_file:
        try:
            os.close(
                open_private(Path(settings.log_file), os.O_WRONLY)
            )  # it holds texts of clients
            handlers.append(LogFile(settings.log_file, encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"cannot write --log-file {settings.log_file}: {error.strerror}"
            ) from error
    for handler in handlers:
        is_coloured = handler is screen and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        handler.setFormatter(LineFormatter(with_time=settings.timestamps, is_coloured=is_coloured))
    logging.basicConfig(level=_LOG_LEVELS.get(settings.verbosity, logging.DEBUG), handlers=handlers)
    # Libraries log a line for each of their steps.
    for name in ("httpx", "httpx2", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if settings.verbosity <= 3:
        logging.getLogger("llama.cpp").setLevel(logging.ERROR)
    for warning in warnings:
        log.warning("%s", warning)


class LogFile(logging.FileHandler):
    """A file that reports once on stderr that it cannot be written, such as when the disk is
    full.
    """

    _said = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            print(f"cannot write --log-file {self.baseFilename}: {error.strerror}", file=sys.stderr)


class LineFormatter(logging.Formatter):
    """A formatter that shows text from elsewhere with escapes, in one line, so that it cannot forge
    lines of the log.

    That holds for the arguments of a message. Other texts of several lines (a table, a traceback)
    are indented, so that no line looks like a message. With ``is_coloured``, time, marks and
    ``strong`` text have colours.
    """

    def __init__(self, *, with_time: bool, is_coloured: bool = False) -> None:
        super().__init__()
        self._with_time = with_time
        self._is_coloured = is_coloured

    def format(self, record: logging.LogRecord) -> str:
        shown = logging.makeLogRecord(record.__dict__)
        if isinstance(record.args, tuple):
            shown.args = tuple(map(_escaped_argument, record.args))
        elif record.args:
            shown.args = {name: _escaped_argument(value) for name, value in record.args.items()}
        first, *more = clean(super().format(shown)).splitlines() or [""]
        text = "\n".join([first, *(f"  {line}" for line in more)])
        if strong := getattr(record, "strong", ""):
            text = text.replace(strong, self._painted(_GREEN, strong), 1)
        mark = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        time = f"{self.formatTime(record, '%H:%M:%S')} " if self._with_time else ""
        colour = _RED if record.levelno >= logging.ERROR else _YELLOW
        return self._painted(_DIM, time) + self._painted(colour, mark) + text

    def _painted(self, colour: int, text: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if text and self._is_coloured else text


_RED = 31
_GREEN = 32
_YELLOW = 33
_DIM = 2


def _escaped_argument(value: object) -> object:
    return value if value is None or isinstance(value, int | float) else one_line(str(value))


LINE_SECONDS = 5.0
"""The time between two lines of the log; a model that is loaded sooner gets none."""


class LoadProgress:
    """A display of fractions from 0 to 1 of loading ``path``: in place on a terminal within a
    ``with`` block, else lines.
    """

    def __init__(self, path: str, line_seconds: float = LINE_SECONDS) -> None:
        self._line_seconds = line_seconds
        self._name = os.path.basename(path)
        self._in_place = sys.stderr.isatty()
        self._next_line = time.monotonic() + self._line_seconds

    def show(self, fraction: float) -> None:
        """Show that ``fraction`` of the model is loaded."""
        if self._in_place:
            text = one_line(f"loading {self._name}: {fraction:.0%}")[
                : shutil.get_terminal_size().columns - 1
            ]
            print(f"{text}\x1b[K\r", end="", file=sys.stderr, flush=True)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + self._line_seconds
            log.info("loading %s: %.0f %%", self._name, fraction * 100)

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_place:
            print("\x1b[K", end="", file=sys.stderr, flush=True)
            self._in_place = False
