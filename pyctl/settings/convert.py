"""Converters for the values of flags: each turns text into a value, or raises a ValueError that
names the format.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

__all__ = [
    "FALSE_WORDS",
    "INT32_MAX",
    "TRUE_WORDS",
    "Convert",
    "choice",
    "directory",
    "file_text",
    "integer",
    "integers",
    "json_object",
    "number",
    "on_off",
    "on_off_auto",
    "printable",
    "server_address",
    "tokens",
    "web_address",
    "words",
]

Convert: TypeAlias = Callable[[str], Any]
"""Converts text to a value; the text of a ValueError names the expected format."""

INT32_MAX = 2**31 - 1
TRUE_WORDS = frozenset({"1", "on", "true", "enabled"})
FALSE_WORDS = frozenset({"0", "off", "false", "disabled"})


def integer(low: int | None = None, high: int = INT32_MAX, **named: int) -> Convert:
    """Return a reader of whole numbers within [low, high]; each name in ``named`` is a word that
    stands for its number.
    """

    def convert(text: str) -> int:
        if text in named:
            return named[text]
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise ValueError(
                f"{text!r} is not a whole number" + "".join(f" or {word}" for word in named)
            )
        return int(_bounded(int(text), low, high))

    return convert


def tokens(low: int | None = None, **named: int) -> Convert:
    """Return a reader of numbers of tokens, as `integer` takes them, or with a unit: "16k" is
    16384, "1m" 1048576.
    """
    whole = integer(low, **named)
    sized = re.compile(r"\A([0-9]{1,9})([kKmM])\Z")
    return lambda text: whole(
        sized.sub(lambda found: str(int(found[1]) << (10 if found[2] in "kK" else 20)), text)
    )


def number(low: float | None = None, high: float | None = None) -> Convert:
    """Return a reader of finite numbers within [low, high]."""

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
        raise ValueError(f"{value} is below the minimum of {low}")
    if high is not None and value > high:
        raise ValueError(f"{value} is above the maximum of {high}")
    return value


def choice(*options: str) -> Convert:
    """Return a reader of one of ``options``."""

    def convert(text: str) -> str:
        if text not in options:
            raise ValueError(f"{text!r} is not one of {', '.join(options)}")
        return text

    return convert


def on_off_auto(text: str) -> str:
    """Return ``on``, ``off`` or ``auto``; accepts llama-server's synonyms."""
    if text in TRUE_WORDS:
        return "on"
    if text in FALSE_WORDS:
        return "off"
    return "auto" if text == "-1" else str(choice("on", "off", "auto")(text))


def words(text: str) -> tuple[str, ...]:
    """Return the non-empty parts of a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def on_off(text: str) -> bool:
    """Return True for ``on`` and False for ``off``, or for llama-server's synonyms. Raises
    ValueError for others.
    """
    if text.lower() in TRUE_WORDS | FALSE_WORDS:
        return text.lower() in TRUE_WORDS
    raise ValueError(f"{text!r} is neither on nor off")


def printable(text: str) -> str:
    """Return printable ASCII, as an HTTP header requires. Raises ValueError for other text."""
    if not (text.isascii() and text.isprintable()):
        raise ValueError("a key can only hold printable ASCII characters")
    return text


def directory(text: str) -> str:
    """Return the path of a directory that exists or can be created. Raises ValueError for a file or
    an unknown home.
    """
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{text!r} names a home that does not exist") from None
    if path.exists() and not path.is_dir():
        raise ValueError(f"{text!r} is not a directory")
    return str(path)


def integers(text: str) -> tuple[int, ...]:
    """Return whole numbers >= 0, separated by commas."""
    return tuple(int(integer(0)(part)) for part in text.split(","))


def file_text(text: str) -> str:
    """Return the contents of the UTF-8 file at ``text`` without a byte order mark. Raises
    ValueError if it cannot be read.
    """
    try:
        return Path(text).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{text!r} is not UTF-8 text") from None
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no such user"
        raise ValueError(f"cannot read {text!r}: {reason}") from error


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for other text."""
    try:
        value = json.loads(
            text, parse_constant=number()
        )  # no NaN, which equals nothing, itself included
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def web_address(text: str) -> str:
    """Return an http or https address; http is the default. Raises ValueError for other text."""
    address = (text if "://" in text else f"http://{text}").rstrip("/")
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", address):
        raise ValueError(f"{text!r} is not an http or https address")
    return address


def server_address(text: str) -> str:
    """Return an http or https address, or ``unix://`` with the absolute path of a socket. Raises
    ValueError for others.
    """
    if re.fullmatch(r"unix:///[^\0]+", text):
        return text
    try:
        return web_address(text)
    except ValueError as error:
        raise ValueError(f"{error}, nor unix:///PATH") from None
