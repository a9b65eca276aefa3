"""`pyctl completion`: the words that a shell completes, asked of the commands' parsers at each
Tab.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

from pyctl.errors import ConfigError
from pyctl.settings.setting import Flag

__all__ = ["candidates", "run_completion"]

SHELLS = ("bash", "zsh")

USAGE = """usage: pyctl completion bash|zsh

Print the lines that let a shell complete commands, flags, values and files:
eval "$(pyctl completion bash)"
"""

WITH_SERVE = ("serve", "chat", "launch", "service", "doctor", "bench", "models")
"""Commands that take flags of serve."""


def run_completion(argv: Sequence[str]) -> int:
    """Print a shell's lines, or words that may complete the given ones; return the exit code: 1
    where files may.

    Raises ConfigError for another shell.
    """
    if argv[:1] == ["words"]:
        words = candidates(argv[1:] or [""])
        print("\n".join(words or ()))
        return 0 if words is not None else 1
    shell = " ".join(argv)
    if argv and shell not in (*SHELLS, "-h", "--help"):
        raise ConfigError(f"completion for {shell!r} does not exist: name {' or '.join(SHELLS)}")
    print(
        Path(__file__).with_name(f"completion.{shell}").read_text("utf-8")
        if shell in SHELLS
        else USAGE,
        end="",
    )
    return 0 if shell in (*SHELLS, "-h", "--help") else 2


def candidates(words: Sequence[str]) -> list[str] | None:
    """Return the words that the last of ``words``, which follow "pyctl", may become; None if it may
    be a file.
    """
    from pyctl.cli import COMMANDS
    from pyctl.cli.programs import PROGRAMS

    *before, last = words
    if not before:
        return _with_prefix(last, COMMANDS)
    flags = _flags(before)
    first = {"launch": [*PROGRAMS], "completion": [*SHELLS]}
    if before[-1] in flags and (values := _values(flags[before[-1]])) is not None:
        return _with_prefix(last, values) if values else None
    if last.startswith("-"):
        return _with_prefix(last, (name for name in flags if name.startswith("-")))
    words_here = first.get(before[0]) or [name for name in flags if not name.startswith("-")]
    return _with_prefix(last, words_here) if len(before) == 1 and words_here else None


def _with_prefix(last: str, words: Iterable[str]) -> list[str]:
    return sorted(word for word in words if word.startswith(last))


def _flags(before: Sequence[str]) -> dict[str, Flag | argparse.Action]:
    """Return the flags that the command in ``before`` takes, and its own commands, by their
    names.
    """
    from pyctl.cli import OWN_FLAGS
    from pyctl.cli.arguments import FLAGS

    command = before[0]
    options = dict[str, Flag | argparse.Action]()
    if command in WITH_SERVE:
        options |= {
            name: flag for flags in FLAGS.values() for flag in flags for name in flag.spellings()
        }
    module = (
        import_module(f"pyctl.cli.{OWN_FLAGS[command].split(':')[0]}")
        if command in OWN_FLAGS
        else None
    )
    if (make := getattr(module, "_parser", None)) is None:
        return options
    for action in (actions := list((make(os.environ) if command == "cache" else make())._actions)):
        if isinstance(action.choices, dict):  # commands of the command
            options |= dict.fromkeys(action.choices, action)
            actions += [
                own
                for name in before[1:2]
                if name in action.choices
                for own in action.choices[name]._actions
            ]
        options |= dict.fromkeys(action.option_strings, action)
    return options


def _values(flag: Flag | argparse.Action) -> list[str] | None:
    """Return the known values of ``flag``; None if it takes none."""
    if isinstance(flag, argparse.Action):
        return None if flag.nargs == 0 or not flag.option_strings else [*(flag.choices or ())]
    if flag.convert is None:
        return None
    try:
        flag.convert("?")
    except ValueError as error:  # a choice names its options
        if (named := re.search(r"is not one of (.+)", str(error))) is not None:
            return named[1].split(", ")
    return []
