"""A custom tool of the Responses API, whose input is any text, as a function with one string, and the way back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pyctl.chat.lark import pattern_of
from pyctl.errors import RequestError

__all__ = ["InputReader", "arguments_of", "function_of"]

_ARGUMENT = "input"
_OPENING = re.compile(rf'\s*\{{\s*"{_ARGUMENT}"\s*:\s*"')
_UNITS = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*",
    re.DOTALL,
)
"""What stands within a string of JSON, no character of it cut."""
_LONE = re.compile("[\ud800-\udfff]")


def function_of(name: str, tool: Mapping[str, Any], at: str) -> dict[str, Any]:
    """The function for ``tool``. A grammar of its input binds the argument, and is part of the description.

    RequestError for one that cannot bind it."""
    description, form = tool.get("description") or "", tool.get("format") or {}
    argument = {"type": "string"}
    kind = form.get("type", "text") if isinstance(form, dict) else None
    if kind == "grammar":
        definition = form.get("definition")
        argument["pattern"] = pattern_of(form.get("syntax"), definition, f"{at}.format")
        description = f"{description}\n\nThe input matches this grammar ({form['syntax']}):\n{definition}".lstrip()
    elif kind != "text":
        raise RequestError(f"{at}.format must be of type text or grammar")
    parameters = {"type": "object", "properties": {_ARGUMENT: argument}, "required": [_ARGUMENT]}
    function = {"name": name, "description": description, "parameters": {**parameters, "additionalProperties": False}}
    return {"type": "function", "function": {**function, "strict": "pattern" in argument}}


def arguments_of(text: str) -> str:
    """The arguments of the function for the input ``text``."""
    return json.dumps({_ARGUMENT: text}, ensure_ascii=False)


class InputReader:
    """Feed it the arguments of one call, JSON text in any pieces; out comes the input, and all the rest of it with
    `finish`. Arguments without an input are the input themselves."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._held = ""
        self._n_sent = 0
        self._is_open = False

    def feed(self, arguments: str) -> str:
        """The part of the input that became certain."""
        self._pieces.append(arguments)
        self._held += arguments
        if not self._is_open:
            opening = _OPENING.match(self._held)
            if opening is None:
                return ""
            self._is_open, self._held = True, self._held[opening.end() :]
        units = _UNITS.match(self._held)
        assert units is not None
        self._held = self._held[units.end() :]
        text = _decoded(units.group())
        self._n_sent += len(text)
        return text

    def finish(self) -> str:
        """The rest of the input."""
        arguments = "".join(self._pieces)
        try:
            value = json.loads(arguments, strict=False)[_ARGUMENT]
        except (ValueError, LookupError, TypeError, RecursionError):
            value = None
        if isinstance(value, str):
            return _LONE.sub("\ufffd", value)[self._n_sent :]
        return "" if self._is_open else arguments


def _decoded(units: str) -> str:
    try:
        return _LONE.sub("\ufffd", json.loads(f'"{units}"', strict=False))
    except ValueError:  # an escape that JSON does not have
        return units
