"""Command-line flags: how one is declared, read from arguments or the environment, and shown by --help.

Follows llama-server's ways: several letters after one dash, underscores for dashes, LLAMA_ARG_NO_* for a negation, and
the last of several wins. Knows no flag by name.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from pyctl.errors import ConfigError

__all__ = [
    "Convert",
    "Flag",
    "Given",
    "choice",
    "file_text",
    "help_text",
    "integer",
    "json_object",
    "number",
    "on_off_auto",
    "read_flags",
    "words",
]

Convert: TypeAlias = Callable[[str], Any]
"""Text to value; the text of a ValueError says what was expected."""

INT32_MAX = 2**31 - 1
TRUE_WORDS = frozenset({"1", "on", "true", "enabled"})
FALSE_WORDS = frozenset({"0", "off", "false", "disabled"})


@dataclass(frozen=True)
class Flag:
    """One way to set the value called ``dest``; ``names`` and ``off`` are separated by blanks.

    Flag("n_ctx", "-c --ctx-size", "tokens of context", integer(0), "LLAMA_ARG_CTX_SIZE")
    Flag("ignore_eos", "--ignore-eos", "do not end at the end-of-text token")       # a switch: stores ``const``
    Flag("slots", "--slots", "serve /slots", off="--no-slots")                      # a switch with a negation
    Flag("flash_attn", "-fa --flash-attn", "...", on_off_auto, bare="on")           # "-fa -c 0" means "-fa on -c 0"
    Flag("logit_bias", "-l --logit-bias", "...", bias, many=True)                   # given twice, the tuples are joined
    """

    dest: str
    names: str
    help: str
    convert: Convert | None = None
    env: str = ""
    metavar: str = "N"
    off: str = ""
    const: Any = True
    bare: str | None = None
    many: bool = False

    def spellings(self) -> list[str]:
        """Everything that may be typed for it."""
        return [*self.names.split(), *self.off.split()]


@dataclass(frozen=True)
class Given:
    """What was asked for: values by destination, the name typed for each, and names that were taken without effect."""

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
            raise ConfigError(f"unexpected argument {word!r}")
        else:
            near = get_close_matches(name, [*known, *unused], n=1, cutoff=0.7)
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


def integer(low: int | None = None, high: int = INT32_MAX, **named: int) -> Convert:
    """Whole numbers within [low, high]; ``named`` are words that stand for one."""

    def convert(text: str) -> int:
        if text in named:
            return named[text]
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise ValueError(f"{text!r} is not a whole number" + "".join(f" or {word}" for word in named))
        return int(_bounded(int(text), low, high))

    return convert


def number(low: float | None = None, high: float | None = None) -> Convert:
    """Finite numbers within [low, high]."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number") from None
        if not math.isfinite(value):
            raise ValueError(f"{text!r} is not a finite number")
        return _bounded(value, low, high)

    return convert


def _bounded(value: float, low: float | None, high: float | None) -> float:
    if low is not None and value < low:
        raise ValueError(f"{value} is too small, the least is {low}")
    if high is not None and value > high:
        raise ValueError(f"{value} is too large, the most is {high}")
    return value


def choice(*options: str) -> Convert:
    """One of ``options``."""

    def convert(text: str) -> str:
        if text not in options:
            raise ValueError(f"{text!r} is none of {', '.join(options)}")
        return text

    return convert


def on_off_auto(text: str) -> str:
    """``on``, ``off`` or ``auto``, also by llama-server's other words for them."""
    if text in TRUE_WORDS:
        return "on"
    if text in FALSE_WORDS:
        return "off"
    return "auto" if text == "-1" else str(choice("on", "off", "auto")(text))


def words(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list, empty ones left out."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def file_text(text: str) -> str:
    """The contents of the UTF-8 file at ``text``."""
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{text!r} is not UTF-8 text") from None
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no such user"
        raise ValueError(f"cannot read {text!r}: {reason}") from error


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def help_text(usage: str, groups: Mapping[str, Iterable[Flag]], defaults: Mapping[str, Any]) -> str:
    """Every flag under the title of its group, with its default and its variable."""
    lines = [f"usage: {usage}"]
    for title, flags in groups.items():
        lines += ["", f"{title}:"]
        for flag in flags:
            lines += _help_lines(flag, defaults.get(flag.dest))
    return "\n".join(lines) + "\n"


def _help_lines(flag: Flag, default: Any) -> list[str]:
    names = ", ".join(flag.spellings()) + (f" {flag.metavar}" if flag.convert else "")
    text = flag.help
    if flag.off:
        text += f" (default: {'on' if default else 'off'})"
    elif flag.convert and isinstance(default, (int, float, str)) and default != "":
        text += f" (default: {default})"
    text += f" [{flag.env}]" if flag.env else ""
    body = textwrap.wrap(text, 76, break_long_words=False, break_on_hyphens=False)
    if len(names) <= 28:
        return [f"  {names:<28}  {body[0]}", *(" " * 32 + line for line in body[1:])]
    return [f"  {names}", *(" " * 32 + line for line in body)]
