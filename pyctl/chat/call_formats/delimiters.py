"""Delimiters of calls: the texts around the calls, their names and their arguments.

A delimiter is written as in templates, blanks included; in replies, blanks around it do not count.
Each class has the start of a call and the grammar that binds it; `DelimitedScanner` reads the rest.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from pyctl.chat.call_formats.call_format import json_arguments
from pyctl.chat.call_formats.scan import (
    NeedMoreInput,
    json_head,
    skip_blanks,
    starts_with,
    tag_name,
)
from pyctl.chat.constraint import GrammarBuilder
from pyctl.chat.tool_definitions import Tool, Tools

__all__ = [
    "CallDelimiters",
    "CallHead",
    "LiteralDelimiters",
    "NameDelimiters",
    "ObjectDelimiters",
    "TagDelimiters",
    "token_texts",
]

_TOKENS = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
_NAME = re.compile(r'[^\s<>{}()\[\]"]{1,256}')
_MAX_NAME_PART = 600
_LINE = r" /\n/?"

Part: TypeAlias = str | re.Pattern[str] | tuple["Part", ...] | None

_MAX_ANY_ORDER = 5
"""Required arguments in any order: 5 take 32 rules; more of them come in the order of the schema.
"""


def token_texts(text: str) -> Iterator[str]:
    """Yield the texts within a delimiter that may be control tokens, and the delimiter."""
    yield from filter(None, (text.strip(), *_TOKENS.findall(text)))


class CallHead(NamedTuple):
    """The name of a call, its own id if it has one, and where its arguments start; no name if there
    is no call.
    """

    name: str = ""
    call_id: str = ""
    pos: int = 0


@dataclass(frozen=True, kw_only=True)
class CallDelimiters(ABC):
    """The texts around calls: ``begin`` and ``end`` around calls in a row, within these
    ``brackets``; ``open`` and ``close`` around each, ``between`` between two. Each may be empty.
    ``is_alone`` if each call has a ``begin`` and an ``end``.

    ``tokens`` are further texts of tokens that a vocabulary may hide.
    """

    begin: str = ""
    end: str = ""
    brackets: tuple[str, str] = ("", "")
    open: str = ""
    close: str = ""
    between: str = "\n"
    is_alone: bool = False
    tokens: tuple[str, ...] = ()

    @property
    def opener(self) -> str:
        """The text with which the first call starts."""
        return (self.begin or self.open).strip()

    def other_openers(self, tools: Tools) -> Iterable[str]:
        """Return the texts with which a call starts where ``begin`` is missing."""
        return ()

    @property
    def all_tokens(self) -> Iterator[str]:
        """Texts that may be control tokens."""
        for field in fields(self):
            value = getattr(self, field.name)
            texts = value if isinstance(value, tuple) else (value,)
            for text in texts:
                if isinstance(text, str):
                    yield from token_texts(text)

    def first(self, text: str) -> int:
        """Return the position of the first call in ``text``, which starts with an opener; negative
        if there is none.
        """
        begin = self.begin.strip()
        bracket = self.brackets[0].strip()
        if not begin or not text.startswith(begin):
            return 0
        pos = skip_blanks(text, len(begin))
        if not bracket:
            return pos
        if not starts_with(bracket, text, pos):
            return -1
        return skip_blanks(text, pos + len(bracket))

    @abstractmethod
    def head(self, text: str, pos: int) -> CallHead:
        """Return the head of the call at ``pos``. Raises NeedMoreInput if the text ends too early
        to decide.
        """

    @abstractmethod
    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """Return the grammar expression for one call of ``tool``. Raises RequestError for an
        invalid schema.
        """

    def calls(self, grammar: GrammarBuilder, call: str, parallel: bool) -> str:
        """Return the grammar expression for one ``call``, or for several if ``parallel``."""
        blanks = r"/\n{1,2}/?"
        begin = grammar.text(self.begin + self.brackets[0])
        end = grammar.text(self.brackets[1] + self.end)
        if not self.begin or self.is_alone:
            one = f"{blanks} {begin} {call} {end}"
            return f"({one})+" if parallel else one
        more = ""
        if parallel:
            between = grammar.text(self.between)
            more = f"({between} {call})*"
        return f"{blanks} {begin} {call} {more} {end}"


@dataclass(frozen=True, kw_only=True)
class ObjectDelimiters(CallDelimiters):
    """A call is a JSON object, which may start with an id under ``id_before``, or end with one
    under ``id_after``.

    Without a ``name_key`` its only member has the arguments, under the name. ``blanks`` stand
    before the name, before the arguments, and after them.
    """

    name_key: str = "name"
    arguments_key: str = "arguments"
    id_before: str = ""
    id_after: str = ""
    blanks: tuple[str, str, str] = ("", " ", "")

    def head(self, text: str, pos: int) -> CallHead:
        """Return the head up to the arguments. Other members may come before them."""
        name, pos = json_head(text, self.object_at(text, pos), self.arguments_key, self.name_key)
        return CallHead(
            name=name,
            call_id="",
            pos=pos,
        )

    def object_at(self, text: str, pos: int) -> int:
        """Return the position of the object of the call at ``pos``, after the opening delimiter if
        that is there.
        """
        opening = self.open.strip()
        if self.open and starts_with(opening, text, pos):
            pos = skip_blanks(text, pos + len(opening))
        return pos

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """Return the expression for a call whose arguments follow the schema as a whole."""
        name = grammar.quoted(json.dumps(tool.name, ensure_ascii=False))
        first, second, last = self.blanks
        name_key = first
        middle = grammar.text(": ")
        if self.name_key:
            name_key = f'{first}"{self.name_key}": '
            middle = grammar.text(f',{second}"{self.arguments_key}": ')
        head = grammar.text(f"{self.open}{{{name_key}")
        end = grammar.text(f"{last}}}{self.close}")
        if self.id_before:
            before = grammar.text(f'{self.open}{{"{self.id_before}": "')
            after = grammar.text(f'", {name_key}')
            head = f"{before} /[0-9]{{1,3}}/ {after}"
        if self.id_after:
            before = grammar.text(f', "{self.id_after}": "')
            after = grammar.text('"')
            end = f"{before} /[A-Za-z0-9]{{9}}/ {after} {end}"
        arguments = json_arguments(grammar, tool)
        return f"{head} {name} {middle} {arguments} {end}"


@dataclass(frozen=True, kw_only=True)
class NameDelimiters(CallDelimiters):
    """A call is a name and its arguments as JSON. ``parts`` stand between ``open`` and the
    arguments: texts, None for the name, a pattern for an id, and tuples of parts that may be
    missing. The last may be missing in a reply.

    ``ids`` are the ids of calls: none, the text that the pattern matches, or all that stands before
    the last part. ``is_known`` if only the name of a tool makes it a call.
    """

    parts: tuple[Part, ...] = (None,)
    ids: Literal["", "pattern", "all"] = ""
    is_known: bool = False

    def other_openers(self, tools: Tools) -> Iterable[str]:
        """Return the opener of a single call."""
        return (self.open.strip(),) if self.begin else ()

    def head(self, text: str, pos: int) -> CallHead:
        """Return the head up to the arguments. Raises NeedMoreInput where ``text`` ends too
        early.
        """
        opening = self.open.strip()
        if not starts_with(opening, text, pos):
            return CallHead()
        pos += len(opening)
        end = text.find("{", pos, pos + _MAX_NAME_PART)
        if end < 0:
            if len(text) - pos < _MAX_NAME_PART and _is_one_word(text[pos:]):
                raise NeedMoreInput
            return CallHead()
        match = self._pattern.fullmatch(text[pos:end].strip())
        if match is None:
            return CallHead()
        call_id = match["all"]
        if self.ids != "all":
            call_id = self._id(match.groupdict().get("id"))
        return CallHead(
            name=match["name"],
            call_id=call_id,
            pos=end,
        )

    def _id(self, text: str | None) -> str:
        if not self.ids or not text:
            return ""
        for part in _flat(self.parts):
            if isinstance(part, re.Pattern):
                return text if part.fullmatch(text) else ""
        return ""

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        before = "".join(map(_matching, self.parts[:-1]))
        last = _matching((self.parts[-1],))
        return re.compile(f"(?P<all>{before}){last}", re.DOTALL)

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """Return the expression for a name and its arguments."""
        pieces = [grammar.text(self.open)]
        for part in self.parts:
            pieces.append(_written(grammar, part, tool.name))
        pieces.append(json_arguments(grammar, tool))
        pieces.append(grammar.text(self.close))
        return " ".join(filter(None, pieces))


def _is_one_word(text: str) -> bool:
    """Return whether ``text`` may be delimiters and a name, and is not a sentence."""
    second = text.split(maxsplit=2)[1:2]
    return not second or second[0][0] in "[<`"


def _flat(parts: Iterable[Part]) -> Iterator[Part]:
    for part in parts:
        if isinstance(part, tuple):
            yield from _flat(part)
        else:
            yield part


def _matching(part: Part) -> str:
    if isinstance(part, tuple):
        inner = "".join(map(_matching, part))
        return f"(?:{inner})?"
    if isinstance(part, re.Pattern):
        return r"\s*(?P<id>\w*)\s*"
    if part is None:
        return r"\s*(?P<name>[\w./:-]{1,256}?)\s*"
    text = re.escape(part.strip())
    return rf"\s*{text}\s*"


def _written(grammar: GrammarBuilder, part: Part, name: str) -> str:
    if isinstance(part, tuple):
        inner = " ".join(_written(grammar, piece, name) for piece in part)
        return f"({inner})?"
    if isinstance(part, re.Pattern):
        return f"/{part.pattern}/"
    if part is None:
        return grammar.quoted(name)
    return grammar.text(part)


@dataclass(frozen=True, kw_only=True)
class TagDelimiters(CallDelimiters):
    """A call is a name and arguments between tags. ``name_end`` follows the name; ``key_open`` and
    ``key_end`` are around the name of an argument, then comes one of ``value_opens``, and
    ``value_end`` after the value.

    Of two ``value_opens``, the first starts a string, the second JSON. ``is_loose`` if a
    model may start a line after each tag, or not.
    """

    name_end: str = ""
    key_open: str
    key_end: str
    value_opens: tuple[str, ...] = ("",)
    value_end: str
    is_loose: bool = False

    def other_openers(self, tools: Tools) -> Iterable[str]:
        """Yield the openers of a single call, with the name of a function where its tag is
        ambiguous.
        """
        if self.begin and self.open.endswith(">"):
            yield self.open
        elif self.begin:
            yield from (f"{self.open}{tool.name}{self.name_end.strip()}" for tool in tools.tools)

    @property
    def has_lines(self) -> bool:
        """True if values are on separate lines."""
        return (self.key_end + self.value_opens[0]).endswith("\n")

    @property
    def after_value(self) -> tuple[str, ...]:
        """The tags of which one follows the end of a value."""
        delimiters = (self.key_open, self.close, self.end)
        return tuple(delimiter.strip() for delimiter in delimiters if delimiter)

    def head(self, text: str, pos: int) -> CallHead:
        """Return the head up to the first tag of an argument."""
        opening = self.open.strip()
        if not starts_with(opening, text, pos):
            return CallHead()
        pos += len(opening)
        name_end = self.name_end.strip()
        if name_end:
            name, pos = tag_name(text, pos, name_end)
            return CallHead(
                name=name,
                call_id="",
                pos=pos,
            )
        pos = skip_blanks(text, pos)
        name = ""
        match = _NAME.match(text, pos)
        if match is not None:
            name = match[0]
            pos = skip_blanks(text, match.end())
        elif pos < len(text):
            return CallHead()
        for tag in self.after_value:
            if starts_with(tag, text, pos):
                return CallHead(
                    name=name,
                    call_id="",
                    pos=pos,
                )
        return CallHead()

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """Return the expression for a call between tags. A value is text up to the end tag where
        the schema allows a string, one of its words if it lists them, and JSON by its schema
        otherwise. Required arguments may have any order.
        """
        arguments = {key: self._argument(grammar, tool, key) for key in tool.properties}
        required = [arguments[key] for key in dict.fromkeys(tool.required)]
        others = [argument for key, argument in arguments.items() if key not in tool.required]
        has_others = tool.parameters.get("additionalProperties") not in (None, False)
        if not arguments and (has_others or tool.parameters.get("type", "object") != "object"):
            others = [self._tagged(grammar, r"/[^<>\n]{1,100}/", grammar.until(self.value_end), 0)]
        any_other = ""
        if others:
            either = " | ".join(others)
            any_other = f"({either})*"
        if len(required) > _MAX_ANY_ORDER:
            in_order = " ".join(required)
            body = f"{in_order} {any_other}"
        else:
            body = _any_order(grammar, required, any_other)
        head = grammar.text(self.open)
        end = grammar.text(self.close)
        name = grammar.quoted(tool.name)
        name_end = grammar.text(self.name_end)
        if self.is_loose:
            name_end += _LINE
        return grammar.rule(f"{head} {name} {name_end} {body} {end}")

    def _argument(self, grammar: GrammarBuilder, tool: Tool, key: str) -> str:
        schema = tool.properties[key]
        end = grammar.text(self.value_end)
        words = tool.words(key)
        if words:
            either = _one_of(grammar, words)
            return self._tagged(grammar, grammar.quoted(key), f"{either} {end}", 0)
        if "string" in tool.types(key):
            return self._tagged(
                grammar, grammar.quoted(key), grammar.until(self.value_end, tool.grammar), 0
            )
        return self._tagged(
            grammar, grammar.quoted(key), f"{grammar.json(schema, tool.parameters)} {end}", -1
        )

    def _tagged(
        self,
        grammar: GrammarBuilder,
        key: str,
        value: str,
        opens: int,
    ) -> str:
        """Return the expression for an argument; ``value`` includes the end tag."""
        line = _LINE if self.is_loose else ""
        key_open = grammar.text(self.key_open)
        key_end = grammar.text(self.key_end)
        value_open = grammar.text(self.value_opens[opens])
        return grammar.rule(f"{key_open} {key} {key_end}{line} {value_open} {value}{line}")


def _one_of(grammar: GrammarBuilder, words: Sequence[str | None]) -> str:
    choices = [grammar.quoted("null" if word is None else word) for word in words]
    either = " | ".join(choices)
    return f"({either})"


def _any_order(grammar: GrammarBuilder, required: Sequence[str], between: str) -> str:
    """Return the expression for each of ``required`` once, in any order, with ``between`` around
    them. It has one rule for each set of arguments that remain.
    """
    if not required:
        return between
    rules: dict[frozenset[int], str] = {frozenset(): between}
    subsets = [frozenset(_members(mask)) for mask in range(1, 2 ** len(required))]
    subsets.sort(key=len)
    for remaining in subsets:
        choices = []
        for index in sorted(remaining):
            rest = rules[remaining - {index}]
            choices.append(f"{required[index]} {rest}".rstrip())
        either = " | ".join(choices)
        rules[remaining] = grammar.rule(f"{between} ({either})".strip())
    return rules[subsets[-1]]


def _members(mask: int) -> list[int]:
    return [index for index in range(mask.bit_length()) if mask >> index & 1]


@dataclass(frozen=True, kw_only=True)
class LiteralDelimiters(CallDelimiters):
    """A call is a name and arguments in ``round`` brackets as in Python, or in braces with bare
    keys. ``separator`` stands after the name of an argument; ``quotes`` around strings, which have
    escapes unless one is a tag.
    """

    round: bool = False
    separator: str = ":"
    quotes: tuple[str, ...] = ('"', "'")
    is_sorted: bool = False

    def other_openers(self, tools: Tools) -> Iterable[str]:
        """Return no openers: a name alone starts no call."""
        return ()

    def head(self, text: str, pos: int) -> CallHead:
        """Return the head up to the bracket around the arguments. Raises NeedMoreInput where
        ``text`` ends too early.
        """
        if self.open:
            opening = self.open.strip()
            if not starts_with(opening, text, pos):
                return CallHead()
            pos = skip_blanks(text, pos + len(opening))
        match = _NAME.match(text, pos)
        end = match.end() if match is not None else pos
        if end == len(text) and end - pos < 256:
            raise NeedMoreInput
        name = ""
        if match is not None and text[end] == self.around[0]:
            name = match[0]
        return CallHead(
            name=name,
            call_id="",
            pos=end,
        )

    @property
    def around(self) -> tuple[str, str]:
        """The brackets around the arguments."""
        return ("(", ")") if self.round else ("{", "}")

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """Return the expression for a call with arguments in the order of the schema, or of their
        names with ``is_sorted``. Strings and words are bound, numbers and constants by their
        schema, objects and lists only to their form.
        """
        keys = sorted(tool.properties, key=str.lower) if self.is_sorted else tool.properties
        pairs = [(self._pair(grammar, tool, key), key in tool.required) for key in keys]
        comma = grammar.text(", " if self.round else ",")
        body = _in_order(grammar, pairs, comma)
        if not pairs and tool.parameters.get("additionalProperties") not in (None, False):
            name = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
            separator = grammar.text(self.separator)
            value = self._any(grammar)
            pair = f"{name} {separator} {value}"
            body = f"({pair} ({comma} {pair})*)?"
        opening = grammar.text(self.open)
        tool_name = grammar.quoted(tool.name)
        before = grammar.text(self.around[0])
        after = grammar.text(self.around[1] + self.close)
        return grammar.rule(f"{opening} {tool_name} {before} {body} {after}")

    def _pair(self, grammar: GrammarBuilder, tool: Tool, key: str) -> str:
        """Return the rule for the argument ``key`` and its value.

        Words of the schema are bound to their spelling, numbers and constants to JSON, also with
        Python's names in round brackets. Other values may be any literal.
        """
        types = tool.types(key)
        if words := tool.words(key):
            strings = [word for word in words if word is not None]
            if self.has_escapes:
                strings = [_escaped(word, self.quotes[0]) for word in strings]
            quote = grammar.text(self.quotes[0])
            either = _one_of(grammar, strings)
            value = f"{quote} {either} {quote}"
            if None in words:
                null = grammar.quoted("None" if self.round else "null")
                value = f"({value} | {null})"
        elif types <= {"integer", "number", "boolean", "null"}:
            value = grammar.json(tool.properties[key], tool.parameters)
            if self.round and not types.isdisjoint({"boolean", "null"}):
                value = f'({value} | "True" | "False" | "None")'
        else:
            value = self._string(grammar, is_argument=True)
            if types != {"string"}:
                value = f"({value} | {self._any(grammar)})"
        name = grammar.quoted(key)
        separator = grammar.text(self.separator)
        return grammar.rule(f"{name} {separator} {value}")

    @property
    def after_arguments(self) -> tuple[str, ...]:
        """The texts of which one follows the arguments in round brackets; none for braces, whose
        quotes are tags.
        """
        texts = (self.brackets[1].strip(), self.between.strip(), self.end.strip())
        return tuple(filter(None, texts)) if self.round else ()

    @property
    def has_escapes(self) -> bool:
        """True if a backslash in a string starts an escape."""
        return len(self.quotes[0]) == 1

    def _string(self, grammar: GrammarBuilder, *, is_argument: bool = False) -> str:
        """Return the expression for a string. Within the value of an argument, quotes that cannot
        end it are allowed: see `LiteralReader`.
        """
        if not self.has_escapes:
            tag = self.quotes[0]
            opening = grammar.text(tag)
            rest = grammar.until(tag)
            return f"{opening} {rest}"
        strings = []
        for quote in self.quotes:
            inner = rf"[^{quote}\\\n]|\\."
            end = quote
            if is_argument and self.after_arguments:
                inner = rf"{inner}|{quote}+[ \t]*([^{quote}\\\s,)\]}}]|\\.)"
                end = f"{quote}+"
            strings.append(f"/{quote}({inner})*{end}/")
        return grammar.one_of(strings)

    def _any(self, grammar: GrammarBuilder) -> str:
        """Return the expression for any value."""
        string = self._string(grammar)
        scalar = grammar.json({"type": ["number", "boolean", "null"]})
        key = string if self.has_escapes else r'/[^:{}\[\],"<>]{1,100}/'

        def value(itself: str) -> str:
            pair = f'{key} ":" " "? {itself}'
            mapping = f'"{{" ({pair} ("," " "? {pair})*)? "}}"'
            sequence = f'"[" ({itself} ("," " "? {itself})*)? "]"'
            return f"{string} | {scalar} | {mapping} | {sequence}"

        return grammar.recursive(value)


def _escaped(text: str, quote: str) -> str:
    """Return ``text`` as a string between such quotes has it."""
    inner = json.dumps(text, ensure_ascii=False)[1:-1]
    return inner.replace('\\"', '"').replace(quote, f"\\{quote}")


def _in_order(grammar: GrammarBuilder, pairs: Sequence[tuple[str, bool]], comma: str) -> str:
    """Return the expression for the members in this order, with commas between them. Those that are
    not required may be missing.
    """
    # `first` has no member before it, `following` has one.
    first = ""
    following = ""
    for pair, required in reversed(pairs):
        start = f"{pair} {following}".strip()
        mark = "" if required else "?"
        without = grammar.rule(f"{start} | {first}") if first else f"({start})?"
        first = start if required else without
        following = grammar.rule(f"({comma} {pair}){mark} {following}".strip())
    return first
