"""Parser of GBNF, llama.cpp's grammar notation: linear time, no recursion.

It follows llama.cpp's parser (src/llama-grammar.cpp), oddities included: the last of two rules with
one name applies, an empty class matches the empty text, and an upper limit above 2,000 repetitions
is no limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from pyctl.errors import RequestError
from pyctl.llama.sampling.gbnf_rules import (
    ANY,
    MAX_CODE_POINT,
    Alternative,
    Characters,
    Item,
    Reference,
    Repeat,
    Rules,
    Token,
    in_text,
    letter,
)
from pyctl.settings.limit import limit

__all__ = ["Markers", "read_gbnf"]

_MAX_BYTES = limit(256 * 1024, "`grammar`", "400", "request", "bytes")
_MAX_ITEMS = limit(50_000, "characters, classes and references within a grammar", "400", "request")
_MAX_RULES = limit(10_000, "rules and groups of a grammar", "400", "request")
_MAX_REPEATS = limit(
    2_000, "repetitions of one item of a grammar that are counted", "400", "request"
)


class Markers:
    """Tokens that a grammar may name: ``controls`` are the control tokens by name."""

    def __init__(
        self, controls: Mapping[str, int], n_vocab: int, token_of: Callable[[str], int | None]
    ) -> None:
        self.n_vocab = n_vocab
        self.token_of = token_of
        self._controls = controls
        names = sorted(filter(None, controls), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def parts(self, text: str) -> list[tuple[str, int | None]]:
        """Split ``text`` at names of control tokens into (part, its control token or None)."""
        parts = self._split.split(text) if self._split is not None else [text]
        return [(part, self._controls.get(part)) for part in parts if part]


def read_gbnf(text: str, markers: Markers) -> tuple[Rules, int]:
    """Parse ``text`` into rules and the index of the start rule. Raises RequestError with the line
    and the reason.
    """
    # A string that names a control token matches that token, as in llama.cpp, or the same text
    # character by character.
    if len(text.encode("utf-8", "surrogatepass")) > _MAX_BYTES:
        raise RequestError(f"failed to parse grammar: it has more than {_MAX_BYTES} bytes")
    return _Parser(text, markers).read()


# Patterns without ambiguity: none backtracks by more than one character.
_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_DIGITS = re.compile(r"[0-9]+")
_PLAIN = re.compile(r'[^"\\]+')
_MARKER = re.compile(r"<[^>]*>")
_TOKEN_ID = re.compile(r"<\[([0-9]+)\]>")
_HEX = re.compile(r"[0-9a-fA-F]+")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}


class _Group:
    """A rule or a group in parentheses during parsing. ``begun`` is the start of the last item, for
    repetitions.
    """

    def __init__(self, rule: int, at: int) -> None:
        self.rule = rule
        self.at = at
        self.done: list[Alternative] = []
        self.items: Alternative = []
        self.begun = 0


class _Parser:
    def __init__(self, text: str, markers: Markers) -> None:
        self._text = text
        self._at = 0
        self._markers = markers
        self._names: dict[str, int] = {}
        self._rules: list[list[Alternative] | None] = []
        self._n_items = 0

    def read(self) -> tuple[Rules, int]:
        if "\0" in self._text:
            raise RequestError("failed to parse grammar: it holds a NUL character")
        self._skip(_SPACE)
        while self._at < len(self._text):
            self._rule()
        if "root" not in self._names:
            raise RequestError("failed to parse grammar: there is no rule named root")
        for name, rule in self._names.items():
            if self._rules[rule] is None:
                raise RequestError(
                    f"failed to parse grammar: the rule {name[:60]!r} is not defined"
                )
        return [alternatives or [] for alternatives in self._rules], self._names["root"]

    def _rule(self) -> None:
        name = self._match(_NAME)
        if name is None:
            raise self._error("the name of a rule is expected")
        self._skip(_BLANKS)
        if not self._text.startswith("::=", self._at):
            raise self._error("'::=' is expected")
        self._at += 3
        self._skip(_SPACE)
        rule = self._named(name)
        self._rules[rule] = self._alternatives(rule)
        rest = self._text[self._at : self._at + 2]
        if rest and rest[0] not in "\r\n":
            raise self._error("a new line or the end is expected")
        self._skip(_SPACE)

    def _alternatives(self, rule: int) -> list[Alternative]:
        """Parse the alternatives of ``rule`` up to their end, and return them. Raises RequestError
        for a text that is not a grammar.

        Open groups are on a list and not on Python's stack, so that deep nesting needs no
        recursion. The rule of a group is complete when the group closes. Its reference then is one
        item of the outer group, which a repetition may follow.
        """
        open_groups = [_Group(rule, self._at)]
        while True:
            group = open_groups[-1]
            sign = self._text[self._at : self._at + 1]
            nested = len(open_groups) > 1
            if sign == "|":
                self._at += 1
                group.done.append(group.items)
                group.items = []
                group.begun = 0
                self._skip(_SPACE)
            elif sign == "(":
                open_groups.append(_Group(self._new_rule(), self._at))
                self._at += 1
                self._skip(_SPACE)
            elif sign == ")" and nested:
                self._at += 1
                open_groups.pop()
                self._rules[group.rule] = [*group.done, group.items]
                self._add(open_groups[-1], [Reference(group.rule)])
                self._skip(_SPACE if len(open_groups) > 1 else _BLANKS)
            elif self._item(group, sign):
                self._skip(_SPACE if nested else _BLANKS)
            elif nested:
                self._at = self._at if sign else group.at
                raise self._error("')' is expected" if sign else "a parenthesis is never closed")
            else:
                return [*group.done, group.items]

    def _item(self, group: _Group, sign: str) -> bool:
        """Parse one item or repetition; return False if there is none here."""
        if sign == '"':
            self._add(group, self._string())
        elif sign == "[":
            item = self._class()
            self._add(group, [] if item is None else [item])
        elif sign == ".":
            self._at += 1
            self._add(group, [ANY])
        elif sign and sign in "<!":
            self._add(group, [self._token()])
        elif sign and sign in "*+?{":
            self._repeat(group)
        else:
            name = self._match(_NAME)
            if name is None:
                return False
            self._add(group, [Reference(self._named(name))])
        return True

    def _add(self, group: _Group, items: list[Item]) -> None:
        self._count(len(items))
        group.begun = len(group.items)
        group.items += items

    def _count(self, n: int) -> None:
        self._n_items += n
        if self._n_items > _MAX_ITEMS:
            raise RequestError(f"failed to parse grammar: it has more than {_MAX_ITEMS} items")

    # -- repetitions
    # ----------------------------------------------------------------------------------

    def _repeat(self, group: _Group) -> None:
        """Replace the last items of ``group`` by a repetition of them. Raises RequestError for an
        impossible one, at the position of its sign.

        A repetition of several items, or of a repetition, gets an extra rule, since `Repeat` has
        one item.
        """
        start = self._at
        low, high = self._times()
        items = group.items[group.begun :]
        if not items:
            self._at = start
            raise self._error("there is nothing to repeat before this")
        if high is not None and high < low:
            self._at = start
            raise self._error(f"a repetition from {low} to {high} times")
        if low > _MAX_REPEATS:
            self._at = start
            raise self._error(f"more than {_MAX_REPEATS} repetitions")
        if high is not None and high > _MAX_REPEATS:
            high = None
        del group.items[group.begun :]
        if high == 0:
            return
        item = items[0]
        if len(items) > 1 or isinstance(item, Repeat):
            rule = self._new_rule()
            self._rules[rule] = [items]
            item = Reference(rule)
        self._count(1)
        group.items.append(item if (low, high) == (1, 1) else Repeat(item, low, high))

    def _times(self) -> tuple[int, int | None]:
        """Parse ``*``, ``+``, ``?`` or ``{low,high}``; return the minimum and the maximum, None for
        no maximum. Raises RequestError for anything else.
        """
        sign = self._text[self._at]
        self._at += 1
        if sign != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        self._skip(_SPACE)
        low = self._number()
        self._skip(_SPACE)
        high: int | None = low
        if self._text.startswith(",", self._at):
            self._at += 1
            self._skip(_SPACE)
            high = self._number() if _DIGITS.match(self._text, self._at) else None
            self._skip(_SPACE)
        if not self._text.startswith("}", self._at):
            raise self._error("'}' is expected")
        self._at += 1
        return low, high

    def _number(self) -> int:
        digits = self._match(_DIGITS)
        if digits is None:
            raise self._error("a number is expected")
        return int(digits[:20]) if len(digits) < 20 else 10**20

    # -- characters and tokens
    # ----------------------------------------------------------------------------------

    def _string(self) -> Alternative:
        """Parse a string and return its letters as items. Raises RequestError if it is never
        closed.

        The spelling of a control token becomes a rule of two alternatives, the token itself and its
        letters. Escapes are resolved first, so that an escaped spelling counts too.
        """
        start = self._at
        self._at += 1
        letters: list[str] = []
        while not self._text.startswith('"', self._at):
            if plain := self._match(_PLAIN):
                letters.append(plain)
            elif self._at < len(self._text):
                code = self._escaped()
                letters.append(chr(code) if code <= MAX_CODE_POINT else "\0")
            else:
                self._at = start
                raise self._error("a string is never closed")
        self._at += 1
        items: Alternative = []
        for part, token in self._markers.parts("".join(letters)):
            spelled: Alternative = [letter(each) for each in part]
            if token is None:
                items += spelled
                continue
            self._count(len(spelled))
            rule = self._new_rule()
            self._rules[rule] = [[Token(token, False)], spelled]
            items.append(Reference(rule))
        return items

    def _class(self) -> Characters | None:
        """Parse a class in brackets; return its characters, None for an empty class. Raises
        RequestError if it is never closed.

        A hyphen before the closing bracket is a character and no range.
        """
        start = self._at
        self._at += 1
        is_inverse = self._text.startswith("^", self._at)
        self._at += is_inverse
        ranges: list[tuple[int, int]] = []
        n = 0
        while True:
            if self._at >= len(self._text):
                self._at = start
                raise self._error("a class is never closed")
            if self._text[self._at] == "]":
                break
            low = high = self._code_point()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                if self._at >= len(self._text):
                    continue
                high = self._code_point()
            ranges.append((low, high))
            n += 1
        self._at += 1
        self._count(n // 4)
        if not n:
            return None
        return Characters(in_text(ranges), is_inverse)

    def _code_point(self) -> int:
        if self._text[self._at] == "\\":
            return self._escaped()
        self._at += 1
        return ord(self._text[self._at - 1])

    def _escaped(self) -> int:
        kind = self._text[self._at + 1 : self._at + 2]
        if kind in _ESCAPES:
            self._at += 2
            return ord(_ESCAPES[kind])
        if kind not in _HEX_DIGITS:
            raise self._error("this escape is not known")
        digits = self._text[self._at + 2 : self._at + 2 + _HEX_DIGITS[kind]]
        if len(digits) < _HEX_DIGITS[kind] or not _HEX.fullmatch(digits):
            raise self._error(f"{_HEX_DIGITS[kind]} hexadecimal digits are expected")
        self._at += 2 + len(digits)
        return int(digits, 16)

    def _token(self) -> Token:
        other = self._text[self._at] == "!"
        self._at += other
        if match := _TOKEN_ID.match(self._text, self._at):
            number = int(match[1]) if len(match[1]) < 10 else self._markers.n_vocab
            if number >= self._markers.n_vocab:
                raise self._error(f"the vocabulary has {self._markers.n_vocab} tokens")
            self._at = match.end()
            return Token(number, other)
        marker = _MARKER.match(self._text, self._at)
        if marker is None:
            raise self._error("a token is expected: <text> or <[number]>")
        token = self._markers.token_of(marker[0]) if len(marker[0]) <= 256 else None
        if token is None:
            raise self._error("this is not one token")
        self._at = marker.end()
        return Token(token, other)

    # -- places
    # ----------------------------------------------------------------------------------

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        return match[0]

    def _named(self, name: str) -> int:
        if name not in self._names:
            self._names[name] = self._new_rule()
        return self._names[name]

    def _new_rule(self) -> int:
        if len(self._rules) >= _MAX_RULES:
            raise RequestError(
                f"failed to parse grammar: it has more than {_MAX_RULES} rules and groups"
            )
        self._rules.append(None)
        return len(self._rules) - 1

    def _error(self, what: str) -> RequestError:
        line = self._text.count("\n", 0, self._at) + 1
        near = self._text[self._at : self._at + 20]
        return RequestError(
            f"failed to parse grammar: line {line}: {what}" + (f", at {near!r}" if near else "")
        )
