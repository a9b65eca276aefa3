"""Delimiters of calls: the texts around the calls, their names and their arguments.

A delimiter is written as in templates, blanks included; in replies, blanks around it do not count.
Each class has the start of a call and the grammar that binds it; `DelimitedScanner` reads the rest.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from pyctl.chat.call_formats.scan import (
    skip_blanks,
    starts_with,
)
from pyctl.chat.constraint import GrammarBuilder
from pyctl.chat.tool_definitions import Tool, Tools

__all__ = ["CALL_NAME", "CallDelimiters", "CallHead", "either_word", "token_texts"]

_TOKENS = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


CALL_NAME = re.compile(r'[^\s<>{}()\[\]"]{1,256}')
"""The name of a call, where no delimiter ends it."""


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


def either_word(grammar: GrammarBuilder, words: Sequence[str | None]) -> str:
    """Return the grammar expression for one of ``words``, of which None is null."""
    choices = [grammar.quoted("null" if word is None else word) for word in words]
    either = " | ".join(choices)
    return f"({either})"


@dataclass(frozen=True, kw_only=True)
class CallDelimiters(ABC):
    """The texts around calls: ``begin`` and ``end`` around calls in a row, within these
    ``brackets``; ``open`` and ``close`` around each, ``between`` between two. Each may be empty.
    ``wraps_each_call`` if each call has a ``begin`` and an ``end``.

    ``tokens`` are further texts of tokens that a vocabulary may hide.
    """

    begin: str = ""
    end: str = ""
    brackets: tuple[str, str] = ("", "")
    open: str = ""
    close: str = ""
    between: str = "\n"
    wraps_each_call: bool = False
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
        if not self.begin or self.wraps_each_call:
            one = f"{blanks} {begin} {call} {end}"
            return f"({one})+" if parallel else one
        more = ""
        if parallel:
            between = grammar.text(self.between)
            more = f"({between} {call})*"
        return f"{blanks} {begin} {call} {more} {end}"
