from __future__ import annotations

from typing import Annotated, Any

import pytest

from pyctl.errors import RequestError
from pyctl.requests.body import (
    Body,
    ChatBody,
    CompletionBody,
    ConversationBody,
    Flattened,
    InfillBody,
    Integer,
    Names,
    others,
    parse_json,
)


class Inner(Body, frozen=True):
    text: str = ""


class Greeting(Body, frozen=True):
    loud: bool = False
    times: Annotated[int, Integer(low=1), Names("times", "n")] = 1
    pitch: float | None = None
    words: tuple[str, ...] = ()
    inner: Inner = Inner()
    n_members: Annotated[int, Flattened(len)] = 0


@pytest.mark.parametrize(
    ("values", "greeting"),
    [
        ({}, Greeting()),
        ({"loud": None, "times": None, "inner": None}, Greeting(n_members=3)),
        ({"n": 3}, Greeting(times=3, n_members=1)),
        ({"n": 3, "times": 2}, Greeting(times=2, n_members=2)),
        ({"n": 3, "times": None}, Greeting(times=3, n_members=2)),
        ({"times": 2.9}, Greeting(times=2, n_members=1)),
        ({"pitch": 2}, Greeting(pitch=2.0, n_members=1)),
        ({"words": "a"}, Greeting(words=("a",), n_members=1)),
        ({"words": ["a", "b"]}, Greeting(words=("a", "b"), n_members=1)),
        ({"inner": {"text": "x", "more": 1}}, Greeting(inner=Inner(text="x"), n_members=1)),
        ({"whatever": {}}, Greeting(n_members=1)),
    ],
)
def test_what_a_body_says(values: dict[str, Any], greeting: Greeting) -> None:
    assert Greeting.of(values) == greeting


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loud": 1}, "'loud' must be true or false"),
        ({"times": True}, "'times' must be a number"),
        ({"n": 0}, r"'n' must be in \[1, 2147483647\], not 0"),
        ({"n": 2**40}, "'n' must be in"),
        ({"pitch": "high"}, "'pitch' must be a number"),
        ({"pitch": 10**400}, "'pitch' is too large a number"),
        ({"words": [1]}, "'words' must be a string or a list of strings"),
        ({"inner": []}, "'inner' must be an object"),
        ({"inner": {"text": 1}}, "'text' must be a string"),
    ],
)
def test_what_a_body_may_not_say(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Greeting.of(values)


def test_what_is_passed_on() -> None:
    assert Greeting.names() == {"loud", "times", "n", "pitch", "words", "inner", "n_members"}
    assert others({"n": 1, "seed": 2, "model": "m"}, Greeting, frozenset({"model"})) == {"seed": 2}


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, InfillBody, ConversationBody])
def test_nothing_said_is_the_default(body: type[Body]) -> None:
    assert body.of({}) == body()


@pytest.mark.parametrize(
    ("body", "words"), [(b"", "is empty"), (b"hello", "is not valid JSON"), (b"{", "truncated")]
)
def test_a_body_that_is_no_json_says_why(body: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_json(body)


@pytest.mark.parametrize(
    ("values", "n_probs"),
    [
        ({"logprobs": True}, 20),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": 2}, 2),
        ({"logprobs": 2, "top_logprobs": 3}, 3),
        ({"logprobs": False, "n_probs": 4}, 4),
        ({"logprobs": True, "n_probs": 0}, 20),
        ({"logprobs": 0}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"n_probs": 0}, None),
        ({"n_probs": -1}, None),
        ({}, None),
    ],
)
def test_log_probabilities_of_a_chat_are_a_switch_or_a_count(
    values: dict[str, Any], n_probs: int | None
) -> None:
    assert ChatBody.of(values).n_probs == n_probs


@pytest.mark.parametrize(
    ("values", "n_probs"),
    [
        ({"logprobs": 0}, 0),
        ({"logprobs": 3}, 3),
        ({"logprobs": False}, None),
        ({"logprobs": None}, None),
        ({"logprobs": -1}, None),
        ({"n_probs": 0}, None),
        ({"n_probs": 2, "logprobs": 0}, 2),
    ],
)
def test_log_probabilities_of_a_text_are_a_count(
    values: dict[str, Any], n_probs: int | None
) -> None:
    assert CompletionBody.of(values).n_probs == n_probs


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
