"""Bounds of numbers in a JSON schema, as the grammar library can bind them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pyctl.chat.json_object import JsonDict, JsonObject
from pyctl.errors import RequestError

__all__ = ["number_bounds"]

_MAX_INTEGER = 2**53 - 1
"""The bound of an integer without one, so that a model does not lose itself in digits; beyond it, a
float skips integers.
"""

# The least signed and the largest unsigned integer of 64 bits.
_MIN_SIGNED = -(2**63)
_MAX_UNSIGNED = 2**64 - 1

# Bounds of other numbers are dropped beyond these.
_MAX_NUMBER = 1e15
_MIN_NUMBER = 1e-6


def number_bounds(schema: JsonObject, *, whole: bool) -> JsonDict:
    """Return the bounds of a number, always some if it is ``whole``. Bounds of other numbers that
    are too fine or too large are dropped. Raises RequestError.
    """
    bounds: JsonDict = {}
    for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        value = schema.get(key)
        if value is None or isinstance(value, bool):  # draft 4 has true for exclusive
            continue
        if not isinstance(value, int | float) or not -(2**63) <= value <= 2**64:
            raise RequestError(f"{key!r} in a JSON schema must be a number of 64 bits")
        bounds[key] = value
    if whole:
        return _integer_bounds(bounds, schema.get("multipleOf"))
    return {
        key: value
        for key, value in bounds.items()
        if value == 0 or _MIN_NUMBER <= abs(value) <= _MAX_NUMBER
    }


def _integer_bounds(bounds: Mapping[str, float], factor: Any) -> JsonDict:
    """Return the bounds of an integer, both of them, with a ``factor`` that is whole.

    Raises RequestError if there is no integer between them.
    """
    lowest = _lowest_integer(bounds)
    highest = _highest_integer(bounds)
    low = -_MAX_INTEGER if lowest is None else lowest
    high = _MAX_INTEGER if highest is None else highest
    # One bound beyond the usual ones is joined by another of 64 bits.
    if highest is None and low > high:
        high = _MAX_UNSIGNED
    if lowest is None and low > high:
        low = _MIN_SIGNED
    if low > high:
        raise RequestError(f"there is no integer between minimum {low} and maximum {high}")
    ready = {"minimum": low, "maximum": high}
    if isinstance(factor, int | float) and 0 < factor < 2**31 and factor == int(factor):
        ready["multipleOf"] = int(factor)
    return ready


def _lowest_integer(bounds: Mapping[str, float]) -> int | None:
    """Return the lowest integer within the bounds; None without a lower bound."""
    lows = []
    if "minimum" in bounds:
        lows.append(math.ceil(bounds["minimum"]))
    if "exclusiveMinimum" in bounds:
        lows.append(math.floor(bounds["exclusiveMinimum"]) + 1)
    return max(lows, default=None)


def _highest_integer(bounds: Mapping[str, float]) -> int | None:
    """Return the highest integer within the bounds; None without an upper bound."""
    highs = []
    if "maximum" in bounds:
        highs.append(math.floor(bounds["maximum"]))
    if "exclusiveMaximum" in bounds:
        highs.append(math.ceil(bounds["exclusiveMaximum"]) - 1)
    return min(highs, default=None)
