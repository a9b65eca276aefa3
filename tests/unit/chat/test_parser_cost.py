"""Parsing a reply or a conversation takes linear time, for any text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pyctl.chat.cached_tokenizer import CachedTokenizer
from pyctl.chat.call_formats.scan import coerce_argument, from_python, whole_call
from pyctl.chat.json_schema import ready_schema
from pyctl.chat.rendering import check_messages
from pyctl.engine.stream import LineLimits, TextStream
from pyctl.errors import RequestError
from pyctl.text import clean, one_line
from tests.effort import IS_QUICK, work
from tests.unit.chat.families import CASES, Family
from tests.unit.chat.parsing import TOOLS
from tests.unit.chat.toy import chatml_tokenizer

SIZE = 1 << 11 if IS_QUICK else 1 << 13
MAX_WORK = 300
"""Letters of a reply, and calls for each: more than 10 µs, and what looks at all that came before
makes more.
"""

SIGNS = (
    '"',
    '\\"',
    "'",
    "\\'",
    "\\",
    " ",
    "\n",
    "{",
    "[",
    "}",
    "a",
    '{"a":',
    "<",
    "x=",
    '"name"',
    "True",
    "_",
    "é",
)


def beginnings(family: Family) -> Iterator[str]:
    """Yield the marks of a family after each other, and the beginning of a call up to each place
    where a sign ends.
    """
    yield ""
    for first in family.marks[:4]:
        yield first
        for second in family.marks[:6]:
            yield first + second
    for at, letter in enumerate(family.call):
        if not letter.isalnum():
            yield family.call[: at + 1]


FORMS = {family.form.name: family for family in CASES}.values()


@pytest.mark.parametrize("family", FORMS, ids=lambda family: family.form.name)
def test_a_reply_is_read_in_linear_time(family: Family) -> None:
    """The parser reads each text a bounded number of times, whatever sign of the format follows a
    prefix of a reply again and again. A quadratic parser would let one reply stop the server.
    """
    slow = []
    begun_texts = [*dict.fromkeys(beginnings(family))]
    for begun in begun_texts[:: len(begun_texts) // (1 if IS_QUICK else 2) + 1]:
        for sign in dict.fromkeys((*SIGNS, *family.marks, family.call, begun)):
            if not sign:
                continue
            text = begun + sign * (SIZE // max(len(sign), 1))

            def read(text: str = text) -> None:
                parser = family.form.parser(TOOLS, family.form.tags(""), "content")
                for at in range(0, len(text), 8):
                    parser.feed(text[at : at + 8])
                parser.finish()

            if (done := work(read)) > MAX_WORK * SIZE:
                slow.append((begun, sign, done / SIZE))
    assert not slow


LONG = 1 << 13 if IS_QUICK else 1 << 18

TEXTS = (
    *(*SIGNS, "<|im_start|>", "<|im_", "<|", "(?", "[a", "\\1", "\x1b[", "\u202e"),
    *("x-anthropic-billing-header:", "x-anthropic-billing-header: cch=", "cch="),
)


def billed(text: str) -> object:
    return check_messages([{"role": "system", "content": "x-anthropic-billing-header:" + text}])


def read_stream(text: str) -> None:
    stream = TextStream(("abc", "\n\n\n", "<|im_end|>"))
    lines = LineLimits(4)
    for at in range(0, len(text), 128):
        lines.feed(stream.feed(text[at : at + 128].encode()), False)


def patterns(text: str) -> object:
    part = {"type": "string", "pattern": text[:4000]}
    return ready_schema({"type": "array", "prefixItems": [part] * 400})


READERS: dict[str, Callable[[str], Any]] = {
    "a message": lambda text: check_messages([{"role": "user", "content": text}]),
    "a billing header": billed,
    "an argument": lambda text: coerce_argument(text, {"object", "string"}),
    "Python's literals": from_python,
    "a whole call": whole_call,
    "a stream": read_stream,
    "tokens": lambda text: CachedTokenizer(
        chatml_tokenizer(), chatml_tokenizer().special_tokens()
    ).tokenize(text),
    "patterns of a schema": patterns,
    "a line of the log": one_line,
    "text for a terminal": clean,
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_long_text_of_anything_is_read_in_linear_time(reader: Callable[[str], Any]) -> None:
    slow = []
    for piece in TEXTS:
        text = piece * (LONG // len(piece))

        def read(text: str = text) -> None:
            with contextlib.suppress(RequestError):
                reader(text)

        if (done := work(read)) > MAX_WORK * LONG:
            slow.append((piece, done / LONG))
    assert not slow
