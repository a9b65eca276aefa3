"""Typed fields of a JSON object."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import pytest

from pyctl.errors import NotSupportedError, RequestError
from pyctl.requests.body_reader import (
    Body,
    Flattened,
    Integer,
    Names,
    SameAs,
    Unsupported,
    mixed,
    others,
    reject_unsupported,
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
    assert Greeting.from_json(values) == greeting


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
        Greeting.from_json(values)


def test_what_is_passed_on() -> None:
    assert Greeting.names() == {"loud", "times", "n", "pitch", "words", "inner", "n_members"}
    assert others({"n": 1, "seed": 2, "model": "m"}, Greeting, frozenset({"model"})) == {"seed": 2}


class Nested(Body, frozen=True):
    level: Annotated[int, Names("outer.level", "level")] = 0


@pytest.mark.parametrize(
    ("values", "level"),
    [
        ({"outer": {"level": 2}, "level": 1}, 2),
        ({"outer": {"level": None}, "level": 1}, 1),
        ({"outer": "text", "level": 1}, 1),
        ({"outer.level": 3}, 0),
    ],
)
def test_a_dotted_name_is_a_member_of_an_object(values: dict[str, Any], level: int) -> None:
    assert Nested.from_json(values).level == level


@pytest.mark.parametrize(("value", "read"), [("ab", ["ab"]), ([1, "b", 0], [1, "b", 0]), ([], [])])
def test_texts_and_token_ids_may_mix(value: Any, read: list[str | int]) -> None:
    assert mixed(value, "content", 2) == read


@pytest.mark.parametrize("value", [None, {}, 1, [2], [-1], [True], [1.0], [["a"]]])
def test_other_values_are_neither_texts_nor_token_ids(value: Any) -> None:
    with pytest.raises(RequestError, match="'content' must"):
        mixed(value, "content", 2)


@pytest.mark.parametrize("value", [None, False, 0, "", [], "auto"])
def test_a_field_without_an_effect_is_not_refused(value: Any) -> None:
    reject_unsupported({"voice": value}, {"voice": ("replies are text", "auto")})


def test_a_field_that_is_not_supported_is_refused_with_a_hint() -> None:
    with pytest.raises(NotSupportedError, match="'voice' is not supported: replies are text"):
        reject_unsupported({"voice": "high"}, {"voice": ("replies are text", "auto")})


def test_a_field_may_repeat_the_value_of_another_one() -> None:
    unsupported = {"best_of": ("all come back", SameAs("n"))}
    reject_unsupported({"best_of": 3, "n": 3}, unsupported)
    with pytest.raises(NotSupportedError, match="'best_of' is not supported: all come back"):
        reject_unsupported({"best_of": 3, "n": 2}, unsupported)


def test_a_body_refuses_the_fields_that_it_declares() -> None:
    class Silent(Body, frozen=True):
        unsupported: ClassVar[Unsupported] = {"voice": ("replies are text",)}
        loud: bool = False

    assert Silent.from_json({"voice": None, "loud": True}).loud
    assert Silent.names() == {"loud"}
    with pytest.raises(NotSupportedError, match="'voice' is not supported"):
        Silent.from_json({"voice": "high"})
