"""The house gets no larger: each figure of `tools.house` has a ceiling, which may only be lowered."""

from __future__ import annotations

from tools.house import measure

CEILINGS = {
    "files": 168,
    "lines": 36_590,
    "lines of csrc": 6776,
    "lines of tests": 46_880,
    "methods of the ports": 46,
    "imports between rooms": 437,
    "imports of cache by engine": 15,
    "callables handed on in cache and engine": 42,
    "fields of LiveSequence": 12,
    "fields of Prompt": 6,
    "longest chain of imports": 34,
    "words of the glossary": 30,
}


def test_the_house_gets_no_larger() -> None:
    measured = measure()
    assert measured.keys() == CEILINGS.keys()
    assert {name: number for name, number in measured.items() if number > CEILINGS[name]} == {}
