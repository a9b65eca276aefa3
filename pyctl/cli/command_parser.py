"""The parser of commands that have their own flags, besides settings; and the hint that mistakes
get.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import NoReturn

from pyctl.errors import ConfigError

__all__ = ["CommandParser", "closest", "did_you_mean"]


def closest(word: str, known: Iterable[str]) -> str:
    """Return the one of ``known`` that is closest to ``word``, "" if none is close."""
    from difflib import get_close_matches  # only now: mistakes are rare

    return next(iter(get_close_matches(word, known, n=1, cutoff=0.65)), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the closest of ``known``, "" if none is close.

    A flag that is the beginning of others means the shortest of them.
    """
    names = sorted(known, key=len)
    longer = [name for name in names if word.startswith("--") and name.startswith(f"{word}-")]
    near = longer[0] if longer else closest(word, names)
    return f"; did you mean {near}?" if near else ""


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError for arguments that it cannot read."""

    @classmethod
    def beside_serve(cls, prog: str, usage: str, description: str) -> CommandParser:
        """Return a parser whose command also takes flags of pyctl serve; its own flag is --help."""
        parser = cls(
            prog=prog, usage=usage, description=description, add_help=False, allow_abbrev=False
        )
        parser.add_argument("--help", action="help", help="print this text")
        return parser

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: str) -> None:
        if action.choices is not None and value not in action.choices:
            hint = (
                did_you_mean(value, action.choices)
                or f"; it is not one of {', '.join(action.choices)}"
            )
            raise ConfigError(f"{self.prog} {value}: no such command{hint}")
