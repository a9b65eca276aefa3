"""Sampling fields of a request that a user sets in a chat, checked by the flags that declare them."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from pyctl.convert import integer
from pyctl.engine.sampling import RANDOM_SEED, Sampling, range_of
from pyctl.errors import RequestError
from pyctl.setting import Flag, flags_of

__all__ = ["field_of", "field_value", "settable"]

_NUMBERS = {item.name: range_of(item) for item in fields(Sampling) if range_of(item) or item.name == "seed"}
_FLAGS = {
    **{flag.dest: flag for _, flag in flags_of(Sampling) if flag.dest in _NUMBERS},
    "max_tokens": Flag("--max-tokens", "most tokens of a reply, -1 = until the context is full", integer(-1)),
}
_NAMES = {
    spelling.lstrip("-").replace("-", "_"): name
    for name, flag in _FLAGS.items()
    for spelling in (name, *flag.names.split())
}


def settable() -> dict[str, str]:
    """The names of the fields, and what each does."""
    return {name: flag.help for name, flag in _FLAGS.items()}


def field_of(name: str) -> str:
    """The field that ``name`` or the name of its flag stands for. Raises RequestError."""
    found = _NAMES.get(name.lstrip("-").replace("-", "_"))
    if found is None:
        raise RequestError(f"{name!r} is none of {', '.join(_FLAGS)}")
    return found


def field_value(name: str, text: str) -> Any:
    """The value of field ``name`` that ``text`` stands for, as a request has it. Raises RequestError."""
    convert, bounds = _FLAGS[name].convert, _NUMBERS.get(name)
    assert convert is not None  # each of them has a value
    try:
        value = convert(text)
    except ValueError as error:
        raise RequestError(f"{name}: {error}") from error
    if bounds is not None and not bounds.low <= value <= bounds.high:
        low, high = (f"{end:g}" for end in bounds[:2])
        limits = f"from {low} to {high}" if math.isfinite(bounds.high) else f"at least {low}"
        raise RequestError(f"{name}: {text} is not {limits}")
    if name != "max_tokens":
        Sampling(**{name: value})
    return -1 if name == "seed" and value == RANDOM_SEED else value
