"""Reads flags from arguments and the environment, and shows them in --help.

Follows llama-server's ways: several letters after one dash, underscores for dashes, LLAMA_ARG_NO_* for a negation, and
the last of several wins. Knows no flag by name.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyctl.convert import FALSE_WORDS, TRUE_WORDS, Convert
from pyctl.errors import ConfigError
from pyctl.setting import Flag, Section

__all__ = ["Given", "help_text", "read_flags"]


@dataclass(frozen=True)
class Given:
    """The given flags: values by destination, the name typed for each, and names that were taken without effect."""

    values: Mapping[str, Any]
    typed: Mapping[str, str]
    unused: tuple[str, ...]


def read_flags(
    argv: Sequence[str], environ: Mapping[str, str], flags: Iterable[Flag], unused: Mapping[str, int]
) -> Given:
    """Read ``argv``, then from ``environ`` what it left open.

    ``unused`` are names that are taken without effect, with the number of values after each. Raises ConfigError for
    any other name, and for a value that is missing or wrong.
    """
    flags = tuple(flags)
    known = {name: flag for flag in flags for name in flag.spellings()}
    values: dict[str, Any] = {}
    typed: dict[str, str] = {}
    ignored: dict[str, None] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, attached = word.partition("=") if word.startswith("--") else (word, "", "")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if equals:
            rest.insert(0, attached)
        if (flag := known.get(name)) is not None:
            value = _typed_value(name, flag, rest, bool(equals))
            joined = flag.many and flag.dest in typed
            values[flag.dest] = values[flag.dest] + value if joined else value
            typed[flag.dest] = name
        elif name in unused:
            if len(rest) < unused[name]:
                raise ConfigError(f"{name} needs a value")
            del rest[: unused[name]]
            ignored[name] = None
        elif not name.startswith("-") or not name.strip("-"):
            hint = f"; did you mean -m {word}?" if word.endswith(".gguf") else ""
            raise ConfigError(f"unexpected argument {word!r}{hint}")
        else:
            from difflib import get_close_matches

            begun = [each for each in sorted(known, key=len) if name.startswith("--") and each.startswith(f"{name}-")]
            near = begun or get_close_matches(name, [*known, *unused], n=1, cutoff=0.7)
            raise ConfigError(f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else ""))
    for flag in flags:
        if flag.env and flag.dest not in typed:
            _read_env(flag, environ, values)
    return Given(values, typed, tuple(ignored))


def _typed_value(name: str, flag: Flag, rest: list[str], attached: bool) -> Any:
    if flag.convert is None:
        if attached:
            raise ConfigError(f"{name} takes no value")
        return False if name in flag.off.split() else flag.const
    if flag.bare is not None and not attached and (not rest or rest[0].startswith("-")):
        return flag.convert(flag.bare)
    if not rest:
        raise ConfigError(f"{name} needs a value")
    return _converted(name, flag.convert, rest.pop(0))


def _read_env(flag: Flag, environ: Mapping[str, str], values: dict[str, Any]) -> None:
    if flag.off and flag.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1) in environ.keys() - {flag.env}:
        values[flag.dest] = False
        return
    text = environ.get(flag.env, "")
    if not text:
        return
    if flag.convert is not None:
        value = _converted(flag.env, flag.convert, text)
        values[flag.dest] = values.get(flag.dest, ()) + value if flag.many else value
    elif text in TRUE_WORDS and flag.many:
        values[flag.dest] = values.get(flag.dest, ()) + flag.const
    elif text in TRUE_WORDS:
        values[flag.dest] = flag.const
    elif text not in FALSE_WORDS:
        raise ConfigError(f"{flag.env}: {text!r} is none of on, off, true, false, 1, 0")
    elif flag.off:
        values[flag.dest] = False


def _converted(name: str, convert: Convert, text: str) -> Any:
    try:
        return convert(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def help_text(usage: str, sections: Mapping[Section, Iterable[Flag]]) -> str:
    """Every flag under the title of its section, with its default and its variable."""
    lines = [f"usage: {usage}"]
    for section, flags in sections.items():
        lines += ["", f"{section.title}:"]
        for flag in flags:
            lines += _help_lines(flag)
    return "\n".join(lines) + "\n"


def _help_lines(flag: Flag) -> list[str]:
    names = ", ".join(flag.spellings()) + (f" {flag.metavar}" if flag.convert else "")
    text = flag.help
    if flag.default and (flag.off or flag.convert):
        text += f" (default: {flag.default})"
    text += f" [{flag.env}]" if flag.env else ""
    body = textwrap.wrap(text, 76, break_long_words=False, break_on_hyphens=False)
    if len(names) <= 28:
        return [f"  {names:<28}  {body[0]}", *(" " * 32 + line for line in body[1:])]
    return [f"  {names}", *(" " * 32 + line for line in body)]
