"""Incremental scanning of tool calls as they stream, and the values of their arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Set
from typing import Any, NoReturn

__all__ = ["NeedMoreInput", "as_json", "json_head", "parse_json", "skip", "starts_with", "tag_name", "whole_call"]

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


_MAX_NAME = 256

_NO_NAME = re.compile(r"[\s<>]")

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)

_JSON_HEAD = ("{", '"name"', ":", "", ",", '"arguments"', ":", "{")

"""What stands before the arguments, the empty one for the name; blanks may lie between."""


class NeedMoreInput(Exception):
    """More text is needed to tell."""


def starts_with(tag: str, text: str, at: int) -> bool:
    """Whether ``tag`` stands there; NeedMoreInput if the text ends before that shows."""
    if text.startswith(tag, at):
        return True
    if len(text) - at < len(tag) and tag.startswith(text[at:]):
        raise NeedMoreInput
    return False


def skip(text: str, at: int) -> int:
    """Where the blanks end that begin at ``at``."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def tag_name(text: str, at: int) -> tuple[str, int]:
    """The name before the next ``>`` and where that ends; an empty one if it is none."""
    end = text.find(">", at)
    name = text[at : end if end >= 0 else None]
    if len(name) > _MAX_NAME or _NO_NAME.search(name):
        return "", at
    if end < 0:
        raise NeedMoreInput
    return name, end + 1


def json_head(text: str, at: int) -> tuple[str, int]:
    """The name, and where the arguments begin; an empty name if the text is another one."""
    name = ""
    for word in _JSON_HEAD:
        start = at = skip(text, at)
        if word:
            if not starts_with(word, text, at):
                return "", at
            at += len(word)
            continue
        if not starts_with('"', text, at):
            return "", at
        literal = _STRING.match(text, at)
        if literal is None and len(text) - at <= _MAX_NAME:
            raise NeedMoreInput
        try:
            name = parse_json(literal[0]) if literal is not None else ""
        except ValueError:
            name = ""
        if literal is None or not name or len(name) > _MAX_NAME:
            return "", at
        at = literal.end()
    return name, start


def whole_call(text: str) -> tuple[str, str]:
    """Name and arguments of a call as JSON, in whatever order; an empty name if it is none."""
    try:
        call = parse_json(text)
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = parse_json(arguments)
    except (ValueError, AttributeError):
        return "", ""
    if not isinstance(name, str) or not isinstance(arguments, dict | None):
        return "", ""
    return name, json.dumps(arguments or {}, ensure_ascii=False)
