from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from pyctl.settings.convert import integer, words
from pyctl.settings.setting import CACHE, MODEL, Flag, class_flags, fill


@dataclass(frozen=True)
class Pond:
    depth: int = CACHE.flag(3, "-d --depth", "metres", integer(0), "PYCTL_DEPTH")
    names: tuple[str, ...] = MODEL.flag(
        ("a",), "--names", "of the fish", words, also=(Flag("--no-fish", "none"),)
    )
    is_frozen: bool = MODEL.flag(False, "--frozen", "in winter", off="--thawed")
    extra: Mapping[str, Any] = MODEL.flag({}, "--extra", "more", words)
    spans: tuple[int, ...] = MODEL.flag((1, 2), "--spans", "lengths", words, shown="?", unit="m")
    area: int = 7


def test_a_field_keeps_its_default_and_names_its_flags() -> None:
    assert Pond() == Pond(3, ("a",), False, {}, (1, 2), 7)
    assert Pond.depth == 3
    assert [
        (section.title, flag.dest, flag.names, flag.default) for section, flag in class_flags(Pond)
    ] == [
        ("cache", "depth", "-d --depth", "3"),
        ("model", "names", "--names", ""),
        ("model", "names", "--no-fish", ""),
        ("model", "is_frozen", "--frozen", "off"),
        ("model", "extra", "--extra", ""),
        ("model", "spans", "--spans", "?"),
    ]
    assert Pond.__dataclass_fields__["spans"].metadata["unit"] == "m"


def test_a_class_is_filled_with_what_is_named_as_its_fields() -> None:
    assert fill(Pond, {"depth": 5, "other": 1}, area=8) == Pond(depth=5, area=8)


@pytest.mark.parametrize(
    ("default", "shown"), [(0.5, "0.5"), ("", ""), ((1024,), "1024"), ((), ""), (True, "on")]
)
def test_defaults_are_shown_as_users_write_them(default: Any, shown: str) -> None:
    @dataclass(frozen=True)
    class One:
        value: Any = CACHE.flag(default, "--value", "it", str)  # noqa: RUF009

    assert [flag.default for _, flag in class_flags(One)] == [shown]
