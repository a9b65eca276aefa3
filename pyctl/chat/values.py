"""The values of arguments that a model wrote between tags: text to JSON, by the types that the schema allows."""

from __future__ import annotations

import json
import re
from collections.abc import Set
from typing import Any, NoReturn

__all__ = ["as_json", "parse_json"]

_WORDS = {"True": "true", "False": "false", "None": "null"}
_PYTHON = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\b(?:True|False|None)\b""", re.DOTALL)
_NAMES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (bool, ("boolean",)),
    (int, ("integer", "number")),
    (float, ("number",)),
    (str, ("string",)),
    (list, ("array",)),
    (dict, ("object",)),
)


def as_json(text: str, types: Set[str]) -> str:
    """``text`` as JSON text: as it is where it is JSON of one of ``types``, otherwise as a string.

    Literals and quotes as Python writes them are taken for JSON's. What can be no string stays what JSON says it is.
    """
    if types != {"string"}:
        for candidate in (text.strip(), _from_python(text.strip())):
            try:
                value = parse_json(candidate)
            except ValueError:
                continue
            if not types.isdisjoint(_names(value)) or "string" not in types:
                return candidate
    return json.dumps(text, ensure_ascii=False)


def parse_json(text: str) -> Any:
    """The value of JSON text; anything else, also NaN and what is nested too deeply, raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _names(value: Any) -> tuple[str, ...]:
    return next((names for kind, names in _NAMES if isinstance(value, kind)), ("null",))


def _from_python(text: str) -> str:
    return _PYTHON.sub(_translated, text)


def _translated(match: re.Match[str]) -> str:
    text = match[0]
    if text in _WORDS:
        return _WORDS[text]
    if text[0] == '"':
        return text
    inner = re.sub(r'\\(.)|"', lambda found: _unquoted(found[0]), text[1:-1], flags=re.DOTALL)
    return f'"{inner}"'


def _unquoted(text: str) -> str:
    if text == '"':
        return '\\"'
    return "'" if text == "\\'" else text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
