"""docs/internals/reading.md: its files and tests exist, and are short enough for an evening."""

from __future__ import annotations

import re

import pytest

from tools.house import ROOT, reading_of, tree_of

PAGE = ROOT / "docs" / "internals" / "reading.md"

MAX_CODE = 1580
"""Lines of code, without blank lines, comments and docstrings."""

SECTION = re.compile(r"^## (\d+)\. `(pyctl/[\w/]+\.py)`\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)
TEST_FILE = re.compile(r"^`(tests/[\w/]+\.py)`:$")
TEST = re.compile(r"^- `(test_\w+)`$")


def sections() -> list[tuple[int, str, list[tuple[str, str]]]]:
    """Return (number, file, tests) of each section of the path."""
    return [
        (int(number), file, listed_tests(text))
        for number, file, text in SECTION.findall(PAGE.read_text(encoding="utf-8"))
    ]


def listed_tests(section: str) -> list[tuple[str, str]]:
    """Return (file, test) of each test that a section lists below the name of its file."""
    found = []
    path = ""
    for line in section.splitlines():
        if file := TEST_FILE.match(line):
            path = file[1]
        if test := TEST.match(line):
            found.append((path, test[1]))
    return found


def test_the_path_is_numbered_and_short() -> None:
    numbers = [number for number, _, _ in sections()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > 4
    n_code = sum(reading_of(ROOT / file).code for _, file, _ in sections())
    assert n_code <= MAX_CODE


@pytest.mark.parametrize(("number", "file", "tests"), sections())
def test_each_file_has_tests_that_exist(
    number: int, file: str, tests: list[tuple[str, str]]
) -> None:
    assert (ROOT / file).is_file(), f"section {number}"
    assert tests, f"{file} has no test"
    for path, name in tests:
        functions = [getattr(node, "name", "") for node in tree_of(ROOT / path).body]
        assert name in functions, f"{path} has no {name}"


def test_all_tests_of_the_page_belong_to_a_file() -> None:
    n_named = len(re.findall(r"\btest_\w+`", PAGE.read_text(encoding="utf-8")))
    assert n_named == sum(len(tests) for _, _, tests in sections())
