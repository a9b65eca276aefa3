"""Where the log goes, and how much of it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from pyctl.config import LogSettings
from pyctl.errors import ConfigError

__all__ = ["start_log"]

LEVELS = {-1: logging.CRITICAL + 1, 0: logging.CRITICAL, 1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO}

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
        level=LEVELS.get(settings.verbosity, logging.DEBUG),
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
