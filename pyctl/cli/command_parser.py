"""The parser of commands that have flags of their own; `pyctl serve` and `pyctl chat` read theirs from settings."""

from __future__ import annotations

import argparse
from typing import NoReturn

from pyctl.cli.near import did_you_mean
from pyctl.errors import ConfigError

__all__ = ["CommandParser"]


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError for what it cannot read."""

    @classmethod
    def beside_serve(cls, prog: str, usage: str, description: str) -> CommandParser:
        """A parser whose command takes flags of pyctl serve, too: of its own it has --help."""
        parser = cls(prog=prog, usage=usage, description=description, add_help=False, allow_abbrev=False)
        parser.add_argument("--help", action="help", help="print this text")
        return parser

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: str) -> None:
        if action.choices is not None and value not in action.choices:
            hint = did_you_mean(value, action.choices) or f"; it is none of {', '.join(action.choices)}"
            raise ConfigError(f"{self.prog} {value}: no such command{hint}")
