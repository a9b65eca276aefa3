"""Arguments that are elements within elements, as MiniMax M3 writes them, turned into JSON text as they stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyctl.chat.call_formats.scan import NeedMoreInput, coerce_argument, skip_blanks, starts_with, tag_name
from pyctl.chat.tools import ALL_TYPES, member_of, types_of
from pyctl.text import overlap

__all__ = ["ITEM", "TreeReader"]

ITEM = "item"
"""The name of the elements of a list."""

_DEPTH = 64
_STRING, _OBJECT, _LIST = (frozenset({kind}) for kind in ("string", "object", "array"))


@dataclass
class _Open:
    """An element that is open: what closes it, its schema and the types that this allows, and once that shows, the
    bracket that closes its JSON.
    """

    close: str
    schema: Any
    types: frozenset[str] = ALL_TYPES
    bracket: str = ""
    n_members: int = 0


class TreeReader:
    """Reads the arguments of one call, which ``close`` ends; ``mark`` stands before each tag, ``append`` gets JSON.

    An element without elements in it is a text, which its schema in ``parameters`` says how to read. What cannot belong
    to the arguments ends them, and they stay unfinished.
    """

    def __init__(self, mark: str, close: str, parameters: Mapping[str, Any], append: Callable[[str], None]) -> None:
        self._mark, self._root, self._append = mark, parameters, append
        self._open = [_Open(close, parameters, bracket="}")]
        self._state: Callable[[str, bool], str] = self._members
        self._searched = 0
        self.is_done = False
        append("{")

    def read(self, text: str, final: bool) -> str:
        """Take from ``text`` what is certain, and return the rest."""
        try:
            while not self.is_done:
                text = self._state(text, final)
        except NeedMoreInput as wait:
            return "" if final else str(wait)
        return text

    # Each state takes from the text and returns the rest, or raises NeedMoreInput with it.

    def _members(self, text: str, final: bool) -> str:
        """Between elements: another one, or the end of the one that is open."""
        rest, element = text.lstrip(), self._open[-1]
        try:
            if starts_with(element.close, rest, 0):
                return self._closed(rest)
            if not starts_with(f"{self._mark}<", rest, 0) or len(self._open) > _DEPTH:
                return self._stop(rest)
            name, at = tag_name(rest, len(self._mark) + 1)
        except NeedMoreInput:
            raise NeedMoreInput(rest) from None
        if not name or name.startswith("/"):
            return self._stop(rest)
        is_list = element.bracket == "]"
        key = "" if is_list else f"{json.dumps(name, ensure_ascii=False)}:"
        self._append(("," if element.n_members else "") + key)
        element.n_members += 1
        schema = member_of(element.schema, None if is_list else name, self._root)
        self._open.append(_Open(f"{self._mark}</{name}>", schema, types_of(schema, self._root)))
        self._state = self._begin
        return rest[at:]

    def _begin(self, text: str, final: bool) -> str:
        """After the tag of an element: elements in it, or a text."""
        element, types = self._open[-1], self._open[-1].types
        if types == _STRING:
            self._append('"')
            self._state, self._searched = self._value, 0
            return text
        at = skip_blanks(text, 0)
        try:
            holds_elements = starts_with(f"{self._mark}<", text, at) and not starts_with(element.close, text, at)
            name = tag_name(text, at + len(self._mark) + 1)[0] if holds_elements else ""
        except NeedMoreInput:
            raise NeedMoreInput(text) from None
        if not holds_elements:
            self._state, self._searched = self._value, 0
            return text
        is_list = "array" in types and (name == ITEM or "object" not in types)
        self._append("[" if is_list else "{")
        element.bracket, self._state = ("]" if is_list else "}"), self._members
        return text[at:]

    def _value(self, text: str, final: bool) -> str:
        """Within a text."""
        element, types = self._open[-1], self._open[-1].types
        at = text.find(element.close, self._searched)
        if types == _STRING:
            size = at if at >= 0 else len(text) - (0 if final else overlap(text, element.close))
            self._append(json.dumps(text[:size], ensure_ascii=False)[1:-1])
            if at < 0:
                raise NeedMoreInput(text[size:])
            element.bracket = '"'
        elif at < 0:
            self._searched = max(len(text) - len(element.close), 0)
            raise NeedMoreInput(text)
        elif not text[:at].strip() and types in (_OBJECT, _LIST):
            self._append("{}" if types == _OBJECT else "[]")
        else:
            self._append(coerce_argument(text[:at], types))
        return self._closed(text[at:])

    def _closed(self, text: str) -> str:
        """The innermost element ends here."""
        element = self._open.pop()
        self._append(element.bracket)
        self._state = self._members
        self.is_done = not self._open
        return text if self.is_done else text[len(element.close) :]

    def _stop(self, text: str) -> str:
        self.is_done = True
        return text
