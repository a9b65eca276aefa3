"""Kept numbers may fall, and rise by 2 % at most."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import ratchet
from tools.ratchet import Numbers, Rise


@pytest.mark.parametrize(
    ("kept", "number", "is_risen"),
    [
        (500, 400, False),
        (500, 510, False),
        (500, 510.1, True),
        (10, 11, True),
        (0, 0, False),
        (0, 1, True),
        (0.5, 0.6, True),
    ],
)
def test_two_percent_of_room(kept: float, number: float, is_risen: bool) -> None:
    rises = ratchet.rises({"nodes": {"pyctl": kept}}, {"nodes": {"pyctl": number}})
    assert rises == ([Rise("nodes", "pyctl", kept, number)] if is_risen else [])


def test_a_place_without_a_kept_number_is_a_rise() -> None:
    (rise,) = ratchet.rises({}, {"nodes": {"pyctl/new": 1}})
    assert str(rise) == "nodes, pyctl/new: 1, and no number is kept"


def test_numbers_are_lowered_and_never_raised() -> None:
    kept: Numbers = {"nodes": {"a": 5, "b": 5, "gone": 5}, "gone": {"a": 1}}
    numbers: Numbers = {"nodes": {"a": 4, "b": 6, "new": 1}, "new": {"a": 1}}
    assert ratchet.lowered(kept, numbers) == {"nodes": {"a": 4, "b": 5}}


def test_kept_numbers_are_read_back_and_compared(tmp_path: Path) -> None:
    file = tmp_path / "house.json"
    ratchet.keep({"nodes": {"b": 5.5, "a": 2}}, file)
    assert ratchet.load(file) == {"nodes": {"a": 2, "b": 5.5}}
    assert file.read_text("utf-8").count("\n") == 6  # a line for each number
    assert ratchet.changes({"nodes": {"a": 2, "b": 6, "c": 1}}, file) == [
        "      5.5 -> 6         nodes, b",
        "      new -> 1         nodes, c",
    ]
