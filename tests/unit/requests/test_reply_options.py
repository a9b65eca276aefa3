"""The form of an answer: defaults, aliases, and values that llama-server takes or refuses."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.errors import RequestError
from pyctl.requests.body_reader import MAX_NAMES
from pyctl.requests.reply_options import EchoedOptions, ReplyOptions


def read(**fields: Any) -> ReplyOptions:
    return ReplyOptions.from_json(fields)


def test_a_request_without_options_has_a_whole_answer() -> None:
    """Options of the server stand in for the ones that are None."""
    options = read(messages=[], model="m")
    assert options == ReplyOptions()
    assert not options.stream
    assert options.verbose is None
    assert options.reasoning_format is None
    assert options.ping_seconds is None


def test_the_pause_of_a_stream_has_llama_servers_name() -> None:
    assert read(sse_ping_interval=7).ping_seconds == 7
    assert read(sse_ping_interval=-1).ping_seconds == -1
    assert read(ping_seconds=7).ping_seconds is None, "the name here is none of the API"


@pytest.mark.parametrize(
    ("value", "names"),
    [(["content", "tokens"], ("content", "tokens")), ([], ()), ("content", ()), (3, ()), ({}, ())],
)
def test_anything_but_a_list_of_members_means_all(value: Any, names: tuple[str, ...]) -> None:
    assert read(response_fields=value).response_fields == names


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stream": 1}, "'stream' must be true or false"),
        ({"stream_options": []}, "'stream_options' must be an object"),
        ({"response_fields": [1]}, "'response_fields' must be"),
        ({"response_fields": ["a"] * (MAX_NAMES + 1)}, "'response_fields'"),
        ({"sse_ping_interval": -2}, r"'sse_ping_interval' must be in \[-1,"),
        ({"reasoning_format": 1}, "'reasoning_format' must be a string"),
        ({"lora": [1]}, "'lora' must be an array of objects"),
        ({"lora": [{"id": 0, "scale": 1}] * (MAX_NAMES + 1)}, "'lora'"),
        ({"n_keep": -2}, r"'n_keep' must be in \[-1,"),
        ({"n_discard": -1}, r"'n_discard' must be in \[0,"),
        ({"backend_sampling": "x"}, "'backend_sampling' must be true or false"),
    ],
)
def test_other_values_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    """Fields without an effect are checked as well, as in llama-server."""
    with pytest.raises(RequestError, match=words):
        read(**fields)


def test_fields_without_an_effect_are_beside_the_others() -> None:
    """They are members of the body itself, and the settings of a reply repeat them."""
    options = read(n_keep=4, n_discard=2, n_cache_reuse=8, backend_sampling=True, stream=True)
    assert options.echoed == EchoedOptions(4, 2, 8, True)
    assert options.stream


def test_scales_of_adapters_are_pairs_with_llama_servers_defaults() -> None:
    assert read(lora=[{"id": 1, "scale": 0.5}, {"id": 2}]).lora == ((1, 0.5), (2, 0.0))
    assert read(lora=None).lora == ()
