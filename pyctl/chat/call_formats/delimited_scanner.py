"""The reader of calls between delimiters.

A call starts where its head is complete: a name, and the text before its arguments. A value between
tags ends only where another tag follows, so that it may speak of these tags.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pyctl.chat.call_formats.delimiters import CallDelimiters
from pyctl.chat.call_formats.literal import LiteralReader
from pyctl.chat.call_formats.literal_delimiters import LiteralDelimiters
from pyctl.chat.call_formats.name_delimiters import NameDelimiters
from pyctl.chat.call_formats.object_delimiters import ObjectDelimiters
from pyctl.chat.call_formats.scan import (
    CallScanner,
    NeedMoreInput,
    ValueEnd,
    coerce_argument,
    skip_blanks,
    starts_with,
    tag_name,
    whole_call,
)
from pyctl.chat.call_formats.tag_delimiters import TagDelimiters
from pyctl.chat.tool_definitions import ALL_TYPES, Tools
from pyctl.text import overlap

__all__ = ["DelimitedScanner"]

_STRING = frozenset({"string"})


class DelimitedScanner(CallScanner):
    """A scanner of calls as any of ``all_delimiters`` describe them."""

    def __init__(
        self, tools: Tools, all_delimiters: Sequence[CallDelimiters], id_size: int = 32
    ) -> None:
        openers = [
            opener
            for delimiters in all_delimiters
            for opener in (delimiters.opener, *delimiters.other_openers(tools))
        ]
        super().__init__(tools, list(dict.fromkeys(openers)), id_size)
        self._all_delimiters = all_delimiters
        self._delimiters = all_delimiters[0]
        self._object_end = ValueEnd()
        self._literals = LiteralReader((), False, self._append)
        self._types: frozenset[str] = frozenset()
        self._value_end = ""
        self._searched = 0
        self._n_arguments = 0

    def _begin(self, final: bool) -> bool:
        waits = False
        for delimiters in self._all_delimiters:
            try:
                pos = delimiters.first(self._held)
                if pos >= 0 and self._enter(delimiters, pos):
                    return True
            except NeedMoreInput:
                waits = True
        if waits:
            raise NeedMoreInput
        return False

    def _enter(self, delimiters: CallDelimiters, pos: int) -> bool:
        """Remove the head of the call there from the held text, and all before it; False if there
        is none.
        """
        head = delimiters.head(self._held, pos)
        if not head.name:
            return isinstance(delimiters, ObjectDelimiters) and self._enter_whole(delimiters, pos)
        needs_tool = isinstance(delimiters, NameDelimiters) and delimiters.is_known
        if needs_tool and not self._has(head.name):
            return False
        self._delimiters = delimiters
        self._n_arguments = 0
        state = self._json
        if isinstance(delimiters, TagDelimiters):
            state = self._body
        elif isinstance(delimiters, LiteralDelimiters):
            state = self._literal
            tool = next((tool for tool in self._tools.tools if tool.name == head.name), None)
            names = tool.properties if tool is not None else ()
            self._literals = LiteralReader(
                delimiters.quotes,
                delimiters.has_escapes,
                self._append,
                delimiters.after_arguments,
                names,
            )
        self._start(head.name, head.pos, state, head.call_id)
        return True

    def _enter_whole(self, delimiters: ObjectDelimiters, pos: int) -> bool:
        """Take a call whose members have another order. Only the whole text of it shows whether it
        is a call.
        """
        pos = delimiters.object_at(self._held, pos)
        if not starts_with("{", self._held, pos):
            return False
        end = self._object_end.find(self._held, pos)
        if end < 0:
            return False
        name, arguments = whole_call(self._held[pos:end], delimiters.name_key)
        if not name:
            return False
        self._delimiters = delimiters
        self._start(name, end, self._tail)
        self._append(arguments)
        return True

    def _json_done(self, final: bool) -> bool:
        if isinstance(self._delimiters, ObjectDelimiters) and not self._skip_members(final):
            return False
        self._state = self._tail
        return True

    def _skip_members(self, final: bool) -> bool:
        """Remove the members of an object that follow its arguments, and its end; False if more
        input is needed.
        """
        rest = self._held.lstrip()
        if rest and rest[0] not in ",}":
            return True
        try:
            # A bracket in place of the members before makes it an object again.
            end = self._object_end.find(f"{{{rest}", 0)
        except NeedMoreInput:
            if not final:
                return False
            end = len(rest) + 1
        if end >= 0:
            self._held = rest[end - 1 :]
        return True

    def _literal(self, final: bool) -> bool:
        self._held = self._literals.read(self._held, final)
        if self._literals.is_done:
            self._state = self._tail
        return self._literals.is_done

    def _body(self, final: bool) -> bool:
        """Read the text between the tags of a call: the name of the next argument, or the end."""
        assert isinstance(self._delimiters, TagDelimiters)
        rest = self._held.lstrip()
        tags = self._delimiters.after_value
        name = ""
        pos = 0
        try:
            tag = next((tag for tag in tags if starts_with(tag, rest, 0)), "")
            if tag == self._delimiters.key_open.strip():
                name, pos = self._key(self._delimiters, rest)
        except NeedMoreInput:
            if final:
                self._held = ""
            return False
        if name:
            before = "," if self._n_arguments else "{"
            key = json.dumps(name, ensure_ascii=False)
            self._append(f"{before}{key}:")
            self._n_arguments += 1
            self._held = rest[pos:]
            self._state = self._value_begin
            return True
        self._append("}" if self._n_arguments else "{}")
        self._state = self._tail
        return True

    def _key(self, delimiters: TagDelimiters, text: str) -> tuple[str, int]:
        """Return the name of the argument whose tag starts ``text``, and the position of its value;
        no name if the tag is not one.
        """
        name, pos = tag_name(text, len(delimiters.key_open.strip()), delimiters.key_end.strip())
        types = self._tools.types(self._name, name)
        if delimiters.value_opens != ("",):
            pos = skip_blanks(text, pos)
            opens = [delimiter.strip() for delimiter in delimiters.value_opens]
            matching = (i for i, opening in enumerate(opens) if starts_with(opening, text, pos))
            index = next(matching, None)
            if index is None:
                return "", pos
            pos += len(opens[index])
            # Of two, the first starts a string, the second JSON.
            if index > 0:
                types = types - _STRING or ALL_TYPES - _STRING
            elif len(opens) > 1 and "string" in types:
                types = _STRING
        self._types = types
        return name, pos

    def _value_begin(self, final: bool) -> bool:
        """Read the line break before a value where values are on separate lines; False if more
        input is needed.
        """
        assert isinstance(self._delimiters, TagDelimiters)
        if not self._held and not final:
            return False
        self._value_end = self._delimiters.value_end.strip()
        self._searched = 0
        if self._delimiters.has_lines and self._held.startswith("\n"):
            self._value_end = f"\n{self._value_end}"
            try:
                is_empty = self._ends_at(0, final)  # one line break instead of two
            except NeedMoreInput:
                return False
            if not is_empty:
                self._held = self._held[1:]
        if self._types == _STRING:
            self._append('"')
        self._state = self._value
        return True

    def _value(self, final: bool) -> bool:
        """Read a value up to its end tag and pass it on as JSON; False if more input is needed.

        A string is passed on as it comes. Other values wait for their end, which decides their
        type.
        """
        pos = self._held.find(self._value_end, self._searched)
        try:
            while pos >= 0 and not self._ends_at(pos, final):
                pos = self._held.find(self._value_end, pos + 1)
        except NeedMoreInput:
            self._searched = pos
            return self._value_goes_on(pos)
        if pos < 0:
            self._searched = max(len(self._held) - len(self._value_end), 0)
            n_of_end = 0 if final else overlap(self._held, self._value_end)
            return self._value_goes_on(len(self._held) - n_of_end, final)
        value = self._held[:pos]
        if self._types == _STRING:
            self._append(json.dumps(value, ensure_ascii=False)[1:])
        else:
            self._append(coerce_argument(value, self._types))
        self._held = self._held[pos + len(self._value_end) :]
        self._state = self._body
        return True

    def _value_goes_on(self, size: int, final: bool = False) -> bool:
        """Pass on the characters of the held text that belong to the value; False if more input is
        needed.
        """
        if self._types == _STRING:
            self._append(json.dumps(self._held[:size], ensure_ascii=False)[1:-1])
            self._held = self._held[size:]
            self._searched = 0
        elif final:
            value = self._held
            if "string" in self._types:
                value = json.dumps(value, ensure_ascii=False)[:-1]
            self._append(value)
            self._held = ""
        return False

    def _ends_at(self, pos: int, final: bool) -> bool:
        """Return whether the value ends there: another tag follows, or nothing more."""
        assert isinstance(self._delimiters, TagDelimiters)
        if not starts_with(self._value_end, self._held, pos):
            return False
        after = skip_blanks(self._held, pos + len(self._value_end))
        try:
            return any(starts_with(tag, self._held, after) for tag in self._delimiters.after_value)
        except NeedMoreInput:
            if final:
                return True
            raise

    def _tail(self, final: bool) -> bool:
        """Read the closing delimiter of a call, which may be missing."""
        if self._take(self._delimiters.close.strip(), final):
            self._state = self._after if self._delimiters.begin else self._text
        return self._state != self._tail

    def _take(self, delimiter: str, final: bool) -> bool:
        """Take ``delimiter``, or its beginning at the end of the reply; False if more input is
        needed.
        """
        rest = self._held.lstrip()
        try:
            if delimiter and starts_with(delimiter, rest, 0):
                self._held = rest[len(delimiter) :]
        except NeedMoreInput:
            if not final:
                return False
            self._held = ""
        return True

    def _after(self, final: bool) -> bool:
        """Read the text after a call within others: another call, or the delimiter that ends them,
        which may be missing.
        """
        pos = skip_blanks(self._held, 0)
        between = self._delimiters.between.strip()
        bracket = self._delimiters.brackets[1].strip()
        try:
            if bracket and starts_with(bracket, self._held, pos):
                self._held = self._held[pos + len(bracket) :]
                self._state = self._end
                return True
            if not bracket and starts_with(self._delimiters.end.strip(), self._held, pos):
                self._state = self._end
                return True
            if between and starts_with(between, self._held, pos):
                pos = skip_blanks(self._held, pos + len(between))
            elif between:
                pos = -1
            if self._tools.parallel and pos >= 0 and self._enter(self._delimiters, pos):
                return True
        except NeedMoreInput:
            if not final and len(self._held) - pos < 1 << 13:
                return False
        self._state = self._end if final else self._text
        return True

    def _end(self, final: bool) -> bool:
        if self._take(self._delimiters.end.strip(), final):
            self._state = self._text
        return self._state != self._end
