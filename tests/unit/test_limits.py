"""docs/limits.md is up to date."""

from __future__ import annotations

import re

from pyctl.settings.limit import LIMITS, limit
from tools.limits import PAGE, table


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == table(), "run python -m tools.limits"


def test_times_have_one_unit_and_no_decimals_that_are_zero() -> None:
    assert [line for line in table().splitlines() if re.search(r"\d\.0\b|\bseconds \|", line)] == []


def test_a_limit_is_its_value_and_gets_a_line() -> None:
    assert limit(3 << 20, "moons of a pond", "400", "memory", "bytes") == 3 << 20
    try:
        assert "| moons of a pond | 3 MiB |\n" in table()
    finally:
        LIMITS.pop()
