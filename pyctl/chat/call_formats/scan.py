"""Incremental scanning of tool calls as they stream, and coercion of their arguments to JSON.

`CallScanner` is shared by the parsers of all formats: text that is not a call is content, byte for
byte; from the head of a call on it is a call, always: text that cannot belong to it ends it and is
content, and a reply that ends within leaves its arguments unfinished, so that no client takes them
for whole. Blanks between calls and after the last belong to nothing.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from itertools import groupby
from typing import Any, NoReturn

from pyctl.chat.reply import CallDelta, ReplyDelta
from pyctl.chat.tool_definitions import Tools
from pyctl.text import overlap, random_id

__all__ = [
    "PYTHON_WORDS",
    "CallScanner",
    "NeedMoreInput",
    "ValueEnd",
    "coerce_argument",
    "from_python",
    "joined",
    "json_head",
    "parse_json",
    "skip_blanks",
    "starts_with",
    "string_at",
    "tag_name",
    "type_names",
    "whole_call",
]

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_PYTHON = re.compile(
    r""""(?:[^"\\]|\\.)*(?:"|\\?\Z)|'(?:[^'\\]|\\.)*(?:'|\\?\Z)|\b(?:True|False|None)\b""",
    re.DOTALL,
)
"""A string that is never closed goes on to the end, so that nothing is looked at twice."""
_NAMES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (bool, ("boolean",)),
    (int, ("integer", "number")),
    (float, ("number",)),
    (str, ("string",)),
    (list, ("array",)),
    (dict, ("object",)),
)
_MAX_NAME = 256
_MAX_BEFORE = 3
"""Members before the arguments of a call."""
_NO_NAME = re.compile(r"[\s<>]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_JSON_MARKS = re.compile(r'[{}\[\]"\\]')
_MAX_CALL = 1 << 12
"""Characters of a call that only its end distinguishes from content."""


class NeedMoreInput(Exception):
    """An error of a reader that needs more text for a decision."""


class CallScanner(ABC):
    """A scanner of the content of one reply; ``tools`` defines which functions may be called, and
    whether more than once.

    A call can start only at one of ``openers``. One that the model does not name gets an id of
    ``id_size`` characters.
    """

    def __init__(self, tools: Tools, openers: Sequence[str], id_size: int = 32) -> None:
        """Start in the content, outside of any call."""
        self._tools = tools
        self._id_size = id_size
        self._openers = openers
        self._opener = re.compile("|".join(map(re.escape, openers)))
        self._first_chars = {opener[0] for opener in openers}
        self._repeating = [
            opener for opener in openers if opener[0] in opener[1:]
        ]  # its first character
        self._state: Callable[[bool], bool] = self._text
        self._held = ""
        self._name = ""
        self._depth = 0
        self._in_string = False
        self._blanks = ""  # the beginning of a stretch of content, as long as it is blank
        self._speaking = False
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self._n_calls = 0

    def feed(self, text: str) -> ReplyDelta:
        """Return the parts that became certain with ``text``."""
        self._held += text
        return self._run(final=False)

    def finish(self) -> ReplyDelta:
        """Return the parts that were held back until the end of the reply."""
        delta = self._run(final=True)
        return delta if self._n_calls else delta._replace(content=delta.content + self._blanks)

    @abstractmethod
    def _begin(self, final: bool) -> bool:
        """Remove the head of a call from the held text, which starts with an opener; False if there
        is none.
        """

    @abstractmethod
    def _tail(self, final: bool) -> bool:
        """Read the text after the members or arguments of a call, where its end tag may come; then
        return to `_text`.
        """

    def _run(self, final: bool) -> ReplyDelta:
        while self._state(final):
            pass
        delta = ReplyDelta(
            reasoning="",
            content="".join(self._content),
            calls=joined(self._calls),
        )
        self._content = []
        self._calls = []
        return delta

    # Each state consumes held text and returns whether the next one should try.

    def _text(self, final: bool) -> bool:
        if self._n_calls and not self._tools.parallel:
            return self._emit(len(self._held))
        match = self._opener.search(self._held)
        if match is None:
            return self._emit(len(self._held) if final else self._certain())
        self._emit(match.start())
        try:
            if not self._begin(final):
                self._emit(1)  # the rest may hold another opener
        except NeedMoreInput:
            if not final and len(self._held) <= 2 * _MAX_CALL:
                return False
            self._emit(1)
        return True

    def _certain(self) -> int:
        """Return the number of held characters that start no opener."""
        size = len(self._held) - max(
            (overlap(self._held, opener) for opener in self._repeating), default=0
        )
        for pos in sorted(self._held.rfind(letter) for letter in self._first_chars):
            if pos >= 0 and any(opener.startswith(self._held[pos:]) for opener in self._openers):
                return min(pos, size)
        return size

    def _json(self, final: bool) -> bool:
        """Pass on arguments as JSON, an object, unchanged; `_json_done` follows."""
        pos = 0
        while mark := _JSON_MARKS.search(self._held, pos):
            pos = mark.end()
            if self._in_string:
                if mark[0] == "\\":
                    if pos == len(self._held) and not final:
                        pos -= 1
                        break
                    pos += 1
                self._in_string = mark[0] != '"'
            elif mark[0] == '"':
                self._in_string = True
            elif mark[0] in "{[":
                self._depth += 1
            elif mark[0] in "}]":
                self._depth -= 1
                if not self._depth:
                    self._append(self._held[:pos])
                    self._held = self._held[pos:]
                    self._state = self._json_done
                    return True
        else:
            pos = len(self._held)
        self._append(self._held[:pos])
        self._held = self._held[pos:]
        return False

    def _json_done(self, final: bool) -> bool:
        """Read the brace around the members of a call as JSON, after its arguments."""
        rest = self._held.lstrip()
        if not rest and not final:
            return False
        if rest.startswith("}"):
            self._held = rest[1:]
        self._state = self._tail
        return True

    def _emit(self, size: int) -> bool:
        """Emit ``size`` characters of the held text as content."""
        text = self._held[:size]
        self._held = self._held[size:]
        if not self._speaking:
            text = self._blanks + text
            self._blanks = ""
            self._speaking = bool(text.strip())
            if not self._speaking:
                self._blanks = text
                text = ""
        self._content.append(text)
        return False

    def _start(
        self,
        name: str,
        size: int,
        state: Callable[[bool], bool],
        call_id: str = "",
    ) -> bool:
        """Start a call of ``name`` whose head takes ``size`` characters; ``state`` reads the
        rest.
        """
        self._calls.append(
            CallDelta(
                index=self._n_calls,
                id=call_id or random_id()[: self._id_size],
                name=name,
            )
        )
        self._name = name
        self._depth = 0
        self._in_string = False
        self._n_calls += 1
        self._blanks = ""
        self._speaking = False
        self._held = self._held[size:]
        self._state = state
        return True

    def _append(self, arguments: str) -> None:
        if arguments:
            self._calls.append(CallDelta(self._n_calls - 1, arguments=arguments))

    def _has(self, tool: str) -> bool:
        return any(tool == known_tool.name for known_tool in self._tools.tools)


class ValueEnd:
    """A finder of the end of a value between brackets, as JSON writes it, in text that grows.

    After NeedMoreInput, call again with more text after the same: each character is looked at once.
    """

    def __init__(self, *, max_size: int = _MAX_CALL) -> None:
        self._max_size = max_size
        self._at = 0
        self._depth = 0
        self._is_quoted = False

    def find(self, text: str, begin: int) -> int:
        """Return the position after the value that starts at ``begin``; -1 if it has more than
        ``max_size`` characters.

        Raises NeedMoreInput if the text ends too early to decide.
        """
        pos = max(self._at, begin)
        while (mark := _JSON_MARKS.search(text, pos)) and mark.end() - begin <= self._max_size:
            pos = mark.end()
            letter = mark[0]
            if letter == "\\":
                pos += self._is_quoted
            elif letter == '"':
                self._is_quoted = not self._is_quoted
            elif not self._is_quoted:
                self._depth += 1 if letter in "[{" else -1
                if self._depth <= 0:
                    self._reset()
                    return pos
        if len(text) - begin > self._max_size:
            self._reset()
            return -1
        self._at = max(pos, len(text))
        raise NeedMoreInput

    def _reset(self) -> None:
        self._at = 0
        self._depth = 0
        self._is_quoted = False


def joined(deltas: list[CallDelta]) -> tuple[CallDelta, ...]:
    """Return ``deltas`` with adjacent pieces of arguments joined."""
    joined: list[CallDelta] = []
    for (index, head), group in groupby(deltas, key=lambda delta: (delta.index, bool(delta.name))):
        if head:
            joined += group
        else:
            joined.append(CallDelta(index, arguments="".join(delta.arguments for delta in group)))
    return tuple(joined)


def starts_with(tag: str, text: str, pos: int) -> bool:
    """Return whether ``tag`` is at ``pos``. Raises NeedMoreInput if the text ends too early to
    decide.
    """
    if text.startswith(tag, pos):
        return True
    if len(text) - pos < len(tag) and tag.startswith(text[pos:]):
        raise NeedMoreInput
    return False


def skip_blanks(text: str, pos: int) -> int:
    """Return the position after the blanks that start at ``pos``."""
    return len(text) - len(text[pos:].lstrip())


def tag_name(text: str, pos: int, end_mark: str = ">") -> tuple[str, int]:
    """Return the name before the next ``end_mark``, empty if it is not a name, and the position
    after the mark. Raises NeedMoreInput.
    """
    end = text.find(end_mark, pos)
    name = text[pos : end if end >= 0 else len(text) - overlap(text, end_mark)]
    if len(name) > _MAX_NAME or _NO_NAME.search(name):
        return "", pos
    if end < 0:
        raise NeedMoreInput
    return name, end + len(end_mark)


def json_head(
    text: str,
    pos: int,
    key: str = "arguments",
    name_key: str = "name",
) -> tuple[str, int]:
    """Return the name, and the position of the arguments, whose key is ``key``; an empty name if
    the text is something else.

    The name and another member that is a string may precede the arguments. Without a ``name_key``
    the key of the arguments is the name.
    """
    members: dict[str, str] = {}
    mark = "{"
    while len(members) < _MAX_BEFORE and starts_with(mark, text, pos := skip_blanks(text, pos)):
        member, pos = string_at(text, skip_blanks(text, pos + 1))
        if not member or not starts_with(":", text, pos := skip_blanks(text, pos)):
            break
        pos = skip_blanks(text, pos + 1)
        if member == key or not name_key:
            name = members.get(name_key, "") if name_key else member
            return (name, pos) if name and starts_with("{", text, pos) else ("", pos)
        members[member], pos = string_at(text, pos)
        mark = ","
    return "", pos


def string_at(text: str, pos: int) -> tuple[str, int]:
    """Return the JSON string at ``pos``, empty if it is not one or too long, and the position after
    it. Raises NeedMoreInput.
    """
    if not starts_with('"', text, pos):
        return "", pos
    literal = _STRING.match(text, pos, pos + 6 * _MAX_NAME)
    if literal is None and len(text) - pos <= 6 * _MAX_NAME:
        raise NeedMoreInput
    try:
        value = parse_json(literal[0]) if literal is not None else ""
    except ValueError:
        value = ""
    return (
        (value, literal.end()) if literal is not None and 0 < len(value) <= _MAX_NAME else ("", pos)
    )


def whole_call(text: str, name_key: str = "name") -> tuple[str, str]:
    """Return the name and arguments of a call as JSON, in any order; an empty name if the text is
    not a call.
    """
    try:
        call = parse_json(text)
        name = call.get(name_key)
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = parse_json(arguments)
    except (ValueError, AttributeError):
        return "", ""
    if not isinstance(name, str) or not isinstance(arguments, dict | None):
        return "", ""
    return name, json.dumps(arguments or {}, ensure_ascii=False)


def coerce_argument(text: str, types: Set[str]) -> str:
    """Return ``text`` as JSON text: unchanged if it is JSON of one of ``types``, otherwise as a
    string.

    Python's literals and quotes are read as JSON's. Text whose types exclude a string keeps its
    JSON type.
    """
    if types != {"string"}:
        for candidate in (text.strip(), from_python(text.strip())):
            try:
                value = parse_json(candidate)
            except ValueError:
                continue
            if not types.isdisjoint(type_names(value)) or "string" not in types:
                return candidate
    return json.dumps(text, ensure_ascii=False)


def parse_json(text: str) -> Any:
    """Return the value of JSON text. Raises ValueError for anything else, NaN and deep nesting
    included.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def from_python(text: str) -> str:
    """Return ``text`` with Python's literals and quotes replaced by JSON's."""
    return _PYTHON.sub(_translated, text)


def type_names(value: Any) -> tuple[str, ...]:
    """Return the JSON types of ``value``, the narrowest first."""
    return next((names for kind, names in _NAMES if isinstance(value, kind)), ("null",))


def _translated(match: re.Match[str]) -> str:
    text = match[0]
    if text in PYTHON_WORDS:
        return PYTHON_WORDS[text]
    if text[0] == '"' or len(text) < 2 or text[-1] != "'":
        return text
    inner = re.sub(r'\\(.)|"', lambda found: _unquoted(found[0]), text[1:-1], flags=re.DOTALL)
    return f'"{inner}"'


def _unquoted(text: str) -> str:
    if text == '"':
        return '\\"'
    return "'" if text == "\\'" else text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
