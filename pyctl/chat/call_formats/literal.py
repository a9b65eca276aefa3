"""Arguments as Python writes them, or as Gemma 4 does, turned into JSON text as they stream."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import TypeAlias

from pyctl.chat.call_formats.scan import PYTHON_WORDS, parse_json
from pyctl.text import overlap

__all__ = ["LiteralReader"]

State: TypeAlias = Callable[[str, bool], str]

_WORD = re.compile(r"[^\s,{}()\[\]]*")
_MAX_WORD = 256
_NAME = re.compile(r"[^\W\d][\w.-]*")
_MAX_AHEAD = 300
"""Characters after a quote that decide whether a string ends with it."""
_KEY_END = re.compile(r"[:=,{}()\[\]]")
_ESCAPES = {"\n": "", "'": "'", "0": "\\u0000", "a": "\\u0007", "v": "\\u000b"}
_ESCAPES |= {letter: f"\\{letter}" for letter in '"\\/bfnrt'}
_CODE_SIZE = {"x": 2, "u": 4}
_CODE = re.compile(r"[0-9A-Fa-f]+")


class LiteralReader:
    """A reader of the arguments of one call, from the bracket around them on; ``append`` gets JSON
    text.

    Strings are between ``quotes``, and have escapes with ``has_escapes``. A character that cannot
    belong to the arguments ends them. Each one is read a bounded number of times.

    Some templates write the value of an argument between quotes as it is. So if there are texts of
    which one follows the arguments, ``ends``, a quote within such a value is a part of it unless
    another argument or the end of all comes next; ``names`` are the names of the arguments, empty
    for any.
    """

    def __init__(
        self,
        quotes: tuple[str, ...],
        has_escapes: bool,
        append: Callable[[str], None],
        ends: tuple[str, ...] = (),
        names: Collection[str] = (),
    ) -> None:
        """Start at the bracket around the arguments."""
        self._quotes = quotes
        self._ends = ends
        self._takes_any_name = not names
        self._names = set(names)  # of the arguments that have not come yet
        self._marks = {
            quote: re.compile(re.escape(quote) + (r"|\\" if has_escapes else ""))
            for quote in quotes
        }
        self._append = append
        self._open: list[str] = []  # closing brackets of the open objects and lists
        self._quote = ""
        self._state: State = self._value
        self._after_string: State = self._next
        self.is_done = False

    def read(self, text: str, final: bool) -> str:
        """Consume the certain part of ``text``, and return the rest."""
        while text and not self.is_done:
            state = self._state
            size = len(text)
            text = state(text, final)
            if len(text) == size and self._state == state:
                return "" if final else text
        return text

    # Each state takes from the text and returns the rest: the same text if that is not enough.

    def _value(self, text: str, final: bool) -> str:
        """Read the start of a value: a bracket, a quote or a word. Return the text after it."""
        text = text.lstrip()
        if not text or self._may_be_quote(text):
            return text
        if text[0] in "{[(":
            is_object = (
                text[0] == "{" or not self._open
            )  # also the round brackets around the arguments
            self._append("{" if is_object else "[")
            self._open.append("}" if is_object else "]")
            self._state = self._first
            return text[1:]
        if text[0] in "}])":
            return self._close(text)
        if self._begins_string(text, self._next):
            return text[len(self._quote) :]
        word = _WORD.match(text)
        assert word is not None  # it also matches nothing
        if word.end() == len(text) <= _MAX_WORD and not final:
            return text
        if not word[0]:
            return self._stop(text)
        self._append(_literal(word[0]))
        self._state = self._next
        return text[word.end() :]

    def _first(self, text: str, final: bool) -> str:
        """Read up to the first member of an object or a list, or up to the next one after a
        comma.
        """
        self._state = self._key if self._open[-1] == "}" else self._value
        return text

    def _key(self, text: str, final: bool) -> str:
        """Read the name of a member, which is bare or a string."""
        text = text.lstrip()
        if not text or self._may_be_quote(text):
            return text
        if text[0] in "}])":
            return self._close(text)
        if self._begins_string(text, self._separator):
            return text[len(self._quote) :]
        end = _KEY_END.search(text, 0, _MAX_WORD)
        if end is None:
            return text if len(text) < _MAX_WORD else self._stop(text)
        name = text[: end.start()].strip()
        if not name or end[0] not in ":=":
            return self._stop(text)
        self._append(json.dumps(name, ensure_ascii=False))
        if len(self._open) == 1:
            self._names.discard(name)
        self._state = self._separator
        return text[end.start() :]

    def _separator(self, text: str, final: bool) -> str:
        text = text.lstrip()
        if not text:
            return text
        if text[0] not in ":=":
            return self._stop(text)
        self._append(":")
        self._state = self._value
        return text[1:]

    def _next(self, text: str, final: bool) -> str:
        """Read the text after a member: a comma or a closing bracket."""
        text = text.lstrip()
        if not text:
            return text
        if text[0] in "}])":
            return self._close(text)
        if text[0] != ",":
            return self._stop(text)
        self._append(",")
        self._state = self._first
        return text[1:]

    def _close(self, text: str) -> str:
        self._append(self._open.pop())
        self._state = self._next
        self.is_done = not self._open
        return text[1:]

    def _stop(self, text: str) -> str:
        """End the reader within the arguments, which stay unfinished."""
        self.is_done = True
        return text

    def _string(self, text: str, final: bool) -> str:
        """Read the characters of a string."""
        pos = 0
        while mark := self._marks[self._quote].search(text, pos):
            self._emit(text[pos : mark.start()])
            if mark[0] == self._quote:
                is_end = self._is_end(text, mark.end(), final)
                if is_end is None:
                    return text[mark.start() :]
                if not is_end:
                    self._emit(mark[0])
                    pos = mark.end()
                    continue
                self._append('"')
                self._state = self._after_string
                return text[mark.end() :]
            size = 2 + _CODE_SIZE.get(text[mark.end() : mark.end() + 1], 0)
            pos = mark.start() + size
            if pos > len(text):
                return "" if final else text[mark.start() :]
            if (code := text[mark.start() + 2 : pos]) and not _CODE.fullmatch(code):
                pos = mark.start() + 2
            self._append(_unescaped(text[mark.start() + 1 : pos]))
        size = len(text) - (0 if final else overlap(text[pos:], self._quote))
        self._emit(text[pos:size])
        return text[size:]

    def _is_end(self, text: str, pos: int, final: bool) -> bool | None:
        """Return whether the string ends with the quote before ``pos``; None if more text is
        needed.
        """
        if not self._ends or len(self._open) > 1:
            return True
        after = text[pos : pos + _MAX_AHEAD]
        # Text that stays undecided for that many characters is not a call.
        undecided = True if final else None if len(after) < _MAX_AHEAD else False
        after = after.lstrip()
        if not after:
            return undecided
        rest = after[1:].lstrip()
        if after[0] == ",":
            return self._is_name(rest, undecided)
        if after[0] != ")":
            return False
        if any(end.startswith(rest) for end in self._ends):
            return rest in self._ends or undecided
        return rest.startswith(self._ends)

    def _is_name(self, text: str, undecided: bool | None) -> bool | None:
        """Return whether ``text`` after a comma starts with the name of another argument, or the
        arguments end there; None if more text is needed.
        """
        if text.startswith(")"):
            return True
        name = _NAME.match(text)
        if name is None:
            return False if text else undecided
        separator = text[name.end() :].lstrip()
        if not separator:
            return undecided
        return separator[0] == "=" and (self._takes_any_name or name[0] in self._names)

    def _emit(self, text: str) -> None:
        self._append(json.dumps(text, ensure_ascii=False)[1:-1])

    def _begins_string(self, text: str, then: State) -> bool:
        """Return whether a string starts at the quote; ``then`` follows it."""
        quote = next(filter(text.startswith, self._quotes), "")
        if quote:
            self._append('"')
            self._quote = quote
            self._state = self._string
            self._after_string = then
        return bool(quote)

    def _may_be_quote(self, text: str) -> bool:
        return any(quote.startswith(text) and quote != text for quote in self._quotes)


def _unescaped(text: str) -> str:
    """Return the JSON text for the character after a backslash. A backslash before a character
    without a meaning is itself.
    """
    if len(text) > 1:
        return f"\\u{text[1:]:0>4}"
    return (
        _ESCAPES[text] if text in _ESCAPES else f"\\\\{json.dumps(text, ensure_ascii=False)[1:-1]}"
    )


def _literal(word: str) -> str:
    """Return a word as JSON text: a number or a constant, and otherwise a string."""
    text = PYTHON_WORDS.get(word, word)
    try:
        parse_json(text)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return text
