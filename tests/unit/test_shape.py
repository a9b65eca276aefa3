"""Sizes of functions and classes, and which of them are above a rule."""

from __future__ import annotations

import ast

import pytest

from tools.shape import RULES, Shape, above_rules, highest, shapes

SOURCE = """
class Cache:
    size: int
    name: str

    def __init__(self, a, /, b, *c, d, **e): ...

    @property
    def used(self): ...

    @used.setter
    def used(self, value): ...

    async def close(self):
        def inner(x): ...

    def _private(self): ...

class ServerSettings:
    port: int

def load(path,
         mode): ...
"""


def numbers(source: str, rule: str) -> dict[str, int]:
    return {each.name: each.number for each in shapes(ast.parse(source)) if each.rule == rule}


def test_parameters_are_counted_without_self() -> None:
    assert numbers(SOURCE, "parameters") == {
        "Cache.__init__": 3,
        "Cache.used": 1,
        "Cache.close": 0,
        "Cache._private": 0,
        "inner": 1,
        "load": 2,
    }


def test_lines_of_a_function_end_with_its_body() -> None:
    assert numbers(SOURCE, "lines")["load"] == 2
    assert numbers(SOURCE, "lines")["Cache.close"] == 2


def test_members_of_classes_but_not_of_settings() -> None:
    assert numbers(SOURCE, "public") == {"Cache": 2}
    assert numbers(SOURCE, "fields") == {"Cache": 2}


@pytest.mark.parametrize(("rule", "most"), RULES.items())
def test_a_rule_allows_its_number(rule: str, most: int) -> None:
    shape, above = Shape("f", rule, most), Shape("g", rule, most + 1)
    assert above_rules([[shape]]) == {}
    assert above_rules([[shape, above], [Shape("g", rule, most + 2)]]) == {f"g {rule}": most + 2}


def test_the_highest_number() -> None:
    files = [list(shapes(ast.parse(SOURCE)))]
    assert highest("parameters", files) == 3
    assert highest("public", []) == 0
