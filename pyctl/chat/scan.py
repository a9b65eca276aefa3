"""Looks at the beginning of text that may go on: whether something stands there, or whether it cannot be told yet."""

from __future__ import annotations

import json
import re

from pyctl.chat.values import parse_json

__all__ = ["Unclear", "follows", "json_head", "skip", "tag_name", "whole_call"]

_MAX_NAME = 256
_NO_NAME = re.compile(r"[\s<>]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_JSON_HEAD = ("{", '"name"', ":", "", ",", '"arguments"', ":", "{")
"""What stands before the arguments, the empty one for the name; blanks may lie between."""


class Unclear(Exception):
    """More text is needed to tell."""


def follows(tag: str, text: str, at: int) -> bool:
    """Whether ``tag`` stands there; Unclear if the text ends before that shows."""
    if text.startswith(tag, at):
        return True
    if len(text) - at < len(tag) and tag.startswith(text[at:]):
        raise Unclear
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
        raise Unclear
    return name, end + 1


def json_head(text: str, at: int) -> tuple[str, int]:
    """The name, and where the arguments begin; an empty name if the text is another one."""
    name = ""
    for word in _JSON_HEAD:
        start = at = skip(text, at)
        if word:
            if not follows(word, text, at):
                return "", at
            at += len(word)
            continue
        if not follows('"', text, at):
            return "", at
        literal = _STRING.match(text, at)
        if literal is None and len(text) - at <= _MAX_NAME:
            raise Unclear
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
