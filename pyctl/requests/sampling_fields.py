"""The sampling parameters of a request: read from its body, then put over the server's defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, replace
from itertools import islice
from typing import Any

from pyctl.chat.tokenizer import Tokenizer
from pyctl.engine.sampling import (
    RANDOM_SEED,
    SAMPLER_LETTERS,
    Range,
    Sampling,
    field_range,
    sampler_named,
)
from pyctl.errors import RequestError
from pyctl.requests.body_reader import (
    Integer,
    Reader,
    at_most,
    boolean,
    is_token,
    number,
    out_of_range,
)
from pyctl.requests.text_limit import CHARS_PER_TOKEN
from pyctl.settings.limit import limit

__all__ = ["MAX_BIASES", "build_sampling", "sampling_values"]

_MAX_BREAKERS = limit(32, "`dry_sequence_breakers`", "400", "request")
_MAX_BREAKER = limit(256, "one of the `dry_sequence_breakers`", "400", "request", "characters")
_MAX_SAMPLERS = limit(32, "`samplers`", "400", "request")
MAX_BIASES = limit(8_192, "`logit_bias`", "400", "request", "tokens")

_OTHER_NAMES = {"repeat_penalty": "repetition_penalty"}
"""vLLM's and transformers' name of a sampling parameter, by llama-server's."""


# -- from a body to the members of Sampling
# ----------------------------------------------------------------------------------


def sampling_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of `Sampling` that a body sets, by the ranges declared there;
    ``logit_bias`` stays as sent.

    Raises RequestError.
    """
    members: dict[str, Any] = {}
    for name, read in _READERS.items():
        value = values.get(name)
        if value is None:
            value = values.get(_OTHER_NAMES.get(name, name))
        if value is None:
            continue
        member = read(value, name)
        if member is not None:
            members[name] = member
    return members


def _number_in(limits: Range, is_integer: bool) -> Reader:
    """Return a reader of numbers within ``limits``; it returns None for one that is ignored."""

    def read(value: Any, name: str) -> int | float | None:
        # Clamped before its fraction is cut off: an integer may be given as 1e30.
        clamps = limits.beyond == "cut"
        given = Integer()(value, name) if is_integer and not clamps else number(value, name)
        if clamps:
            given = min(max(given, limits.low), limits.high)
        elif not limits.low <= given <= limits.high:
            if limits.beyond == "ignore":
                return None
            raise out_of_range(name, value, limits.low, limits.high)
        return int(given) if is_integer else float(given)

    return read


def _seed(value: Any, name: str) -> int:
    number(value, name)
    return int(value) & RANDOM_SEED  # -1 is random; wider numbers lose bits


def _breakers(value: Any, name: str) -> tuple[str, ...]:
    """Return the texts that end a repetition for the DRY sampler."""
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise RequestError(f"'{name}' must be a list of strings with at least one")
    at_most(_MAX_BREAKERS, len(value), name)
    at_most(_MAX_BREAKER, max(map(len, value)), name, "characters each")
    return tuple(value)


def _samplers(value: Any, name: str) -> tuple[str, ...] | None:
    """Return samplers from names, in any spelling, or one letter each; unknown ones are ignored, as
    are other values.
    """
    if not isinstance(value, str | list):
        return None
    at_most(_MAX_SAMPLERS, len(value), name)
    if isinstance(value, str):
        return tuple(SAMPLER_LETTERS[letter] for letter in value if letter in SAMPLER_LETTERS)
    if not all(isinstance(item, str) for item in value):
        raise RequestError("'samplers' must be a list of names or a string of letters")
    return tuple(name for name in map(sampler_named, value) if name is not None)


def _unread_biases(value: Any, name: str) -> Any:
    """Return ``logit_bias`` as sent: its texts become tokens only with the model's tokenizer."""
    if isinstance(value, list | dict):
        at_most(MAX_BIASES, len(value), name)
    return value


_OWN_READERS: dict[str, Reader] = {
    "seed": _seed,
    "dry_sequence_breakers": _breakers,
    "samplers": _samplers,
    "logit_bias": _unread_biases,
}


def _reader(item: Field[Any]) -> Reader | None:
    """Return the reader of a member of `Sampling`; None for one that no field of its name sets."""
    limits = field_range(item)
    if limits is not None:
        return _number_in(limits, isinstance(item.default, int))
    if item.name in _OWN_READERS:
        return _OWN_READERS[item.name]
    # More than one field can bind a reply to a grammar: `pyctl.requests.prepare` joins them.
    is_of_grammar = item.name.startswith("grammar")
    return boolean if isinstance(item.default, bool) and not is_of_grammar else None


_READERS = {item.name: read for item in fields(Sampling) if (read := _reader(item)) is not None}

# -- over the server's defaults
# ----------------------------------------------------------------------------------


def build_sampling(
    values: Mapping[str, Any], defaults: Sampling, tokenizer: Tokenizer, n_vocab: int
) -> Sampling:
    """Return ``defaults`` with ``values``, the result of `sampling_values`, in their place.

    Raises RequestError for biases of too many tokens.
    """
    if "logit_bias" not in values:
        return replace(defaults, **values)
    all_biases = _logit_bias(values["logit_bias"], tokenizer, n_vocab)
    biases = tuple(islice(all_biases, MAX_BIASES + 1))
    at_most(MAX_BIASES, len(biases), "logit_bias", "tokens")
    return replace(defaults, **{**values, "logit_bias": biases})


def _logit_bias(value: Any, tokenizer: Tokenizer, n_vocab: int) -> Iterator[tuple[int, float]]:
    """Yield the biases of ``[[token or text, bias or false], ...]`` or ``{token or text: bias or
    false}``.

    A text stands for each of its tokens, false for never. Invalid entries are ignored.
    """
    for token, bias in _bias_pairs(value):
        if bias is False:
            bias = -float("inf")
        elif isinstance(bias, bool) or not isinstance(bias, int | float):
            continue
        bias = number(bias, "logit_bias")
        if isinstance(token, str):
            at_most(CHARS_PER_TOKEN * MAX_BIASES, len(token), "logit_bias", "characters in a text")
            for part in tokenizer.tokenize(token, add_special=False, parse_special=False):
                yield part, bias
        elif is_token(token) and 0 <= token < n_vocab:
            yield token, bias


def _bias_pairs(value: Any) -> list[tuple[Any, Any]]:
    """Return tokens or texts with their biases, from both forms of ``logit_bias``."""
    if isinstance(value, Mapping):
        return [(_token_or_text(key), bias) for key, bias in value.items()]
    if isinstance(value, list):
        return [(pair[0], pair[1]) for pair in value if isinstance(pair, list) and len(pair) == 2]
    return []


def _token_or_text(key: str) -> int | str:
    """Return a number, as llama-server reads one: a number of too many digits is not a token."""
    text = key.strip()
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not (digits.isascii() and digits.isdecimal()):
        return key
    return int(text) if len(digits) < 19 else -1
