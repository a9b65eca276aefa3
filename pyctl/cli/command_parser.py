"""The parser of commands that have flags of their own; `pyctl serve` and `pyctl chat` read theirs from settings."""

from __future__ import annotations

import argparse
from typing import NoReturn

from pyctl.errors import ConfigError

__all__ = ["CommandParser"]


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError for what it cannot read."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")
