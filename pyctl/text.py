"""Text functions that chat, engine, server and terminal share."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from pyctl.settings.limit import limit

__all__ = [
    "clean",
    "duration",
    "error_text",
    "n_common",
    "one_line",
    "overlap",
    "plain",
    "random_id",
    "with_whole_characters",
    "without_addresses",
]

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, bidirectional overrides, line separators and lone surrogates."""


def clean(text: str) -> str:
    """Return ``text`` without characters that control a terminal; line feeds and tabs are kept."""
    return _OBEYED.sub("", text)


def one_line(text: str) -> str:
    """Return ``text`` for one line of a log or table; non-printable characters become escapes, as
    in a repr.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_ROLES = {"user": "You: ", "assistant": "Reply: ", "system": "System: ", "tool": "Tool: "}
_HALF_MARK = re.compile(r"^[a-z_]{0,30}\|?>")
_MESSAGE = re.compile(r"<\|im_start\|>([a-z]{1,30})\n?")
_MARK = re.compile(r"<\|[^|<>\n]{1,30}\|>|</?think>")


def plain(text: str) -> str:
    """Return token text for display, without markup and with role names; same rules as `plain` of
    page/static/dom.js.
    """
    text = _HALF_MARK.sub("", text)
    text = _MESSAGE.sub(lambda found: _ROLES.get(found[1], f"{found[1]}: "), text)
    return " ".join(_MARK.sub(" ", text).split())


def error_text(error: Exception) -> str:
    """Return the message of ``error`` on one line; its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def duration(seconds: float) -> str:
    """Return ``seconds`` for display, in at most two units: ``2.5 s``, ``42 s``, ``3 min 20 s``,
    ``2 h 5 min``.
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def without_addresses(text: str) -> str:
    """Return ``text`` with a note in place of each address with a scheme, whose path or query may
    hold a secret.
    """
    return re.sub(
        r"\b[a-zA-Z][a-zA-Z0-9+.-]{0,20}://\S+", "(an address, in the server's log)", text
    )


def n_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of items that two sequences have in common at the start."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def overlap(text: str, word: str) -> int:
    """Return length of the longest proper prefix of ``word`` that is a suffix of ``text``."""
    for size in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:size]):
            return size
    return 0


def random_id() -> str:
    """Return 32 random letters and digits, as llama-server's ids of replies and calls have."""
    import secrets  # only now: OpenSSL comes with it, and most commands make no id

    return "".join(secrets.choice(string.digits + string.ascii_letters) for _ in range(32))


_MAX_SURROGATES = limit(200_000, "escaped surrogates of a text with half a pair", "400", "request")
"""Each takes a few microseconds of Python."""

_SURROGATE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})"
)
"""A pair, whose second half is the group, or half of one. Each match has at most twelve bytes."""


def with_whole_characters(body: bytes) -> bytes:
    """Return JSON text with U+FFFD for each escape that is half a surrogate pair. Raises ValueError
    if it has too many of them.
    """
    if body.count(b"\\ud") + body.count(b"\\uD") > _MAX_SURROGATES:
        raise ValueError(f"more than {_MAX_SURROGATES} escaped surrogates")
    pieces: list[bytes] = []
    start = 0
    for match in _SURROGATE.finditer(body):
        if _n_backslashes_before(body, match.start()) % 2:
            half = match.span(1)  # the first half is the text "\\ud83d"
        else:
            half = match.span() if match[1] is None else (-1, -1)
        if half[0] >= 0:
            pieces += [body[start : half[0]], b"\\ufffd"]
            start = half[1]
    return b"".join([*pieces, body[start:]])


def _n_backslashes_before(body: bytes, end: int) -> int:
    """Return the length of the run of backslashes that ends at ``end``; examines at most twice as
    many bytes.
    """
    size = 8
    while True:
        window = body[max(end - size, 0) : end]
        n = len(window) - len(window.rstrip(b"\\"))
        if n < size:
            return n
        size *= 2
