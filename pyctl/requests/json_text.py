"""JSON of requests: bounded before it is decoded, and with the mistakes that clients make."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from pyctl.errors import RequestError
from pyctl.settings.limit import limit
from pyctl.text import with_whole_characters

__all__ = ["decode", "parse_json", "parse_object"]

T = TypeVar("T")

_MAX_SIGNS = {
    (b",",): (limit(1_500_000, "commas in a body (values)", "400", "request"), "commas"),
    (b":",): (limit(150_000, "colons in a body (keys)", "400", "request"), "colons"),
    (b"[", b"{"): (limit(300_000, "opening brackets in a body", "400", "request"), "brackets"),
}
"""A value of two bytes takes a hundred in memory, and nothing else runs while the library reads
them.
"""

_BOM = b"\xef\xbb\xbf"
"""The byte order mark that .NET and PowerShell write before UTF-8."""


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the object of the JSON text ``body``. Raises RequestError."""
    values = parse_json(body)
    if not isinstance(values, dict):
        raise RequestError("the body must be a JSON object")
    return values


def parse_json(body: bytes) -> Any:
    """Return the value of the JSON text ``body``, with a byte order mark or without.

    Raises RequestError, also for text with more values than `_MAX_SIGNS` allow.
    """
    for signs, (maximum, name) in _MAX_SIGNS.items():
        n_signs = sum(body.count(sign) for sign in signs)
        if n_signs > maximum:
            raise RequestError(f"the body has more than {maximum} {name}")
    if not body:
        raise RequestError("the body is empty, it must be JSON")
    try:
        return decode(body, Any)
    except msgspec.ValidationError as error:  # a number out of range
        raise RequestError(f"the body is not valid JSON: {error}") from error


def decode(body: bytes, kind: type[T]) -> T:
    """Return the JSON text ``body`` as a ``kind`` of msgspec, however many values it has.

    Half a surrogate pair (``\\ud83d``) is read as U+FFFD: RFC 8259 allows it, and JavaScript writes
    it for a text that was cut within an emoji. Raises RequestError for text that is not JSON, and
    msgspec.ValidationError for another ``kind``.
    """
    body = body.removeprefix(_BOM)
    try:
        return _decode(body, kind)
    except RequestError as error:
        try:
            whole = with_whole_characters(body)
        except ValueError as reason:
            raise RequestError(f"{error}; {reason}") from error
        if whole == body:
            raise
    return _decode(whole, kind)


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        raise  # a subclass of DecodeError, but the text is JSON
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
