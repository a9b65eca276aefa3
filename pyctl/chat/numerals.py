"""Integers between bounds, as digits: GBNF has characters only."""

from __future__ import annotations

from pyctl.errors import RequestError

__all__ = ["integers"]

_MOST_DIGITS = 16
"""Where a bound is missing; beyond, a float no longer tells integers apart."""


def integers(low: int | None, high: int | None) -> str:
    """What matches the integers from ``low`` to ``high``, None for no bound; raises RequestError if there are none."""
    if low is not None and high is not None and low > high:
        raise RequestError(f"no integer lies between minimum {low} and maximum {high}")
    parts = []
    if low is None or low < 0:
        # The numbers below zero, by their distance from it.
        nearest = 1 if high is None or high >= 0 else -high
        parts += [f'"-" {part}' for part in _naturals(nearest, None if low is None else -low)]
    if high is None or high >= 0:
        parts += _naturals(max(low or 0, 0), high)
    return " | ".join(parts)


def _naturals(low: int, high: int | None) -> list[str]:
    """One pattern per range of numbers whose digits can be chosen independently of each other."""
    parts = []
    if high is None:
        digits = len(str(low))
        high = 10**digits - 1
        parts = [f"[1-9] [0-9]{{{digits},{max(digits, _MOST_DIGITS - 1)}}}"]
    ends = {high}
    for power in range(1, len(str(high)) + 1):
        unit = 10**power
        ends |= {low // unit * unit + unit - 1, (high + 1) // unit * unit - 1}
    first = low
    for last in sorted(end for end in ends if low <= end <= high):
        parts.append(_digits(str(first), str(last)))
        first = last + 1
    return parts


def _digits(first: str, last: str) -> str:
    classes = [f"[{a}]" if a == b else f"[{a}-{b}]" for a, b in zip(first, last, strict=True)]
    return " ".join(classes)
