"""JSON of requests, and its bounds."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.errors import RequestError
from pyctl.requests.json_text import parse_json, parse_object


@pytest.mark.parametrize(
    ("body", "words"), [(b"", "is empty"), (b"hello", "is not valid JSON"), (b"{", "truncated")]
)
def test_a_body_that_is_no_json_says_why(body: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_json(body)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (rb'["\ud83d"]', ["\ufffd"]),
        (rb'["a\uDE00b"]', ["a\ufffdb"]),
        (rb'["\ud83d\ude00"]', ["\U0001f600"]),
        (rb'["\ud83d\ud83d\ude00\ude00"]', ["\ufffd\U0001f600\ufffd"]),
        (rb'["\\ud83d", "\ud83d"]', [r"\ud83d", "\ufffd"]),  # the first is text
        (rb'["\\ud83d\ude00"]', [r"\ud83d" + "\ufffd"]),
        (rb'["\\\ud83d\\"]', ["\\\ufffd\\"]),
        (rb'["\ud83d\\ude00"]', ["\ufffd" + r"\ude00"]),
        (rb'{"\ud83d": 1}', {"\ufffd": 1}),
        (b'["' + b"\\" * 100_000 + rb'\ud83d"]', ["\\" * 50_000 + "\ufffd"]),
        (b'["' + rb"\ud83d" * 100_000 + b'"]', ["\ufffd" * 100_000]),
    ],
)
def test_half_a_surrogate_pair_is_a_replacement_character(body: bytes, expected: Any) -> None:
    assert parse_json(body) == expected
    assert parse_json(b"\xef\xbb\xbf" + body) == expected


@pytest.mark.parametrize(
    "body",
    [rb'["\ud83', rb'["\ud83d"', rb"[\ud83d]", rb'["\ud83d' + rb"\ud83d\ude00" * 100_000 + b'"]'],
)
def test_a_body_with_too_many_surrogates_or_none_in_a_text_is_no_json(body: bytes) -> None:
    with pytest.raises(RequestError, match="not valid JSON"):
        parse_json(body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[" + b"1," * 1_500_001 + b"1]", "more than 1500000 commas"),
        (b":" * 150_001, "more than 150000 colons"),
        (b"[" * 150_000 + b"{" * 150_001, "more than 300000 brackets"),
    ],
)
def test_a_body_of_too_many_values_is_not_decoded(body: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_json(body)


def test_an_object_is_no_other_value() -> None:
    assert parse_object(b'{"a": 1}') == {"a": 1}
    with pytest.raises(RequestError, match="must be a JSON object"):
        parse_object(b"[1]")
