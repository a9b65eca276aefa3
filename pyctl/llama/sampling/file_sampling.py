"""Sampling parameters that a GGUF file recommends: the keys under `general.sampling`."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from pyctl.engine.sampling import Sampling, by_names, field_range
from pyctl.errors import RequestError

__all__ = ["recommended_sampling"]

log = logging.getLogger(__name__)

_PREFIX = "general.sampling."

_FIELDS = {
    "sequence": "samplers",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "temp": "temperature",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
"""llama.cpp's keys, each with the field of `Sampling` that it sets."""

_MAX_SHOWN = 40
"""Characters of a wrong value in the log."""


def recommended_sampling(read: Callable[[str], str]) -> dict[str, Any]:
    """Return the parameters of the file, by the fields of `Sampling`.

    ``read`` returns the value of a key as text, "" without one. A value that no request could have
    is logged, and left out or brought into its range, as a request's would be.
    """
    values: dict[str, Any] = {}
    for key, name in _FIELDS.items():
        text = read(_PREFIX + key).strip()
        if not text:
            continue
        try:
            values[name] = _samplers(text) if name == "samplers" else _number(key, name, text)
        except ValueError as error:
            log.warning("%s%s of the file is ignored: %s", _PREFIX, key, error)
    return values


def _samplers(text: str) -> tuple[str, ...]:
    """Parse names of samplers, separated by semicolons. Raises ValueError for an unknown one."""
    names = by_names(text)
    _check("samplers", names)
    return names


def _check(name: str, value: object) -> None:
    """Raise ValueError if a `Sampling` cannot have ``value`` in its field ``name``."""
    made: dict[str, Any] = {name: value}
    try:
        Sampling(**made)
    except RequestError as error:
        raise ValueError(str(error)[: 3 * _MAX_SHOWN]) from error


def _number(key: str, name: str, text: str) -> float:
    """Parse the value of field ``name``. Raises ValueError if it is not one, or is refused."""
    shown = repr(text[:_MAX_SHOWN])
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{shown} is not a number") from None
    # llama.cpp samples with C floats: beyond their range a finite double is infinite.
    if not math.isfinite(ctypes.c_float(value).value):
        raise ValueError(f"{shown} is not a finite number")
    field = next(item for item in fields(Sampling) if item.name == name)
    if isinstance(field.default, int):
        if value != int(value):
            raise ValueError(f"{shown} is not a whole number")
        value = int(value)
    limits = field_range(field)
    assert limits is not None, f"{name} is a number, and numbers have ranges"
    cut = type(value)(min(max(value, limits.low), limits.high))
    if cut != value and limits.beyond != "cut":
        raise ValueError(f"{shown} is outside {limits.low} to {limits.high}")
    # Minus one selects all tokens in llama.cpp, as 0 does.
    if cut != value and (key, value) != ("top_k", -1):
        log.warning("%s%s of the file is cut from %s to %s", _PREFIX, key, shown, cut)
    _check(name, cut)
    return cut
