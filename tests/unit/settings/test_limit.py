"""Limits, declared where they are enforced."""

from __future__ import annotations

from pyctl.settings.limit import LIMITS, Limit, limit


def test_a_limit_is_its_value_and_is_listed() -> None:
    before = len(LIMITS)
    try:
        assert limit(7, "fish of a pond", "400", "request", "MiB") == 7
        assert LIMITS[before:] == [Limit("fish of a pond", 7, "MiB", "400", "request")]
    finally:
        del LIMITS[before:]


def test_a_value_keeps_its_type() -> None:
    before = len(LIMITS)
    try:
        assert isinstance(limit(2.0, "depth", "closed", "connection", "s"), float)
        assert isinstance(limit(2, "depth", "closed", "connection"), int)
        assert LIMITS[-1].unit == "", "a count"
    finally:
        del LIMITS[before:]
