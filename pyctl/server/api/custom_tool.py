"""A custom tool of the Responses API, whose input is any text, as a function with one string, and
the way back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pyctl.errors import RequestError

__all__ = ["to_function", "unwrap_input", "wrap_input"]

_ARGUMENT = "input"
_LONE = re.compile("[\ud800-\udfff]")

_LARK = re.compile(
    r"""(?P<kept>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[a-z]*|//[^\n]*|%[^\n]*)"""
    r"|->[ \t]*\w+|[!?]?(?P<name>[A-Za-z_]\w*)(?:\.[0-9]+(?=\s*:))?"
)
"""Texts, regular expressions, comments and directives; names of alternatives; all others, and a
rule's priority.
"""


def to_function(name: str, tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the function for ``tool``. A grammar of its input is part of the description, and of
    the function.

    Raises RequestError for a format of another kind.
    """
    description = tool.get("description") or ""
    form = tool.get("format") or {}
    kind = form.get("type", "text") if isinstance(form, dict) else None
    grammar = ""
    if kind == "grammar":
        syntax = form.get("syntax")
        definition = form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            raise RequestError(
                f"{where}.format must have a syntax, lark or regex, and a definition"
            )
        grammar = _terminals(definition) if syntax == "lark" else f"START: /{_escaped(definition)}/"
        description = (
            f"{description}\n\nThe input matches this grammar ({syntax}):\n{definition}".lstrip()
        )
    elif kind != "text":
        raise RequestError(f"{where}.format must be of type text or grammar")
    parameters = {
        "type": "object",
        "properties": {_ARGUMENT: {"type": "string"}},
        "required": [_ARGUMENT],
    }
    function = {
        "name": name,
        "description": description,
        "parameters": {**parameters, "additionalProperties": False},
    }
    return {
        "type": "function",
        "function": {**function, "strict": bool(grammar), "grammar": grammar},
    }


def _terminals(definition: str) -> str:
    """Return a grammar of Lark's with its rules as terminals: these have no recursion, so the
    library binds any text by them.
    """

    def named(found: re.Match[str]) -> str:
        name = found["name"] or ""
        is_rule = name.islower() and name != "start"
        return found["kept"] or ("R_" if is_rule else "") + name.upper()

    return _LARK.sub(named, definition)


def _escaped(pattern: str) -> str:
    """Return a regular expression as Lark has it between slashes."""
    ends = {"/": r"\/", "\n": r"\n"}
    return re.sub(
        r"\\.|[/\n]", lambda found: ends.get(found[0], found[0]), pattern, flags=re.DOTALL
    )


def wrap_input(text: str) -> str:
    """Return the arguments of the function for the input ``text``."""
    return json.dumps({_ARGUMENT: text}, ensure_ascii=False)


def unwrap_input(arguments: str) -> str:
    """Return the input in the arguments of a call, JSON text; without one, the arguments are the
    input.
    """
    try:
        value = json.loads(arguments, strict=False)[_ARGUMENT]
    except (ValueError, LookupError, TypeError, RecursionError):
        return arguments
    return _LONE.sub("\ufffd", value) if isinstance(value, str) else arguments
