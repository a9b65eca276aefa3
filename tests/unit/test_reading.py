"""The counts of code lines, nodes and fragments of tiny sources."""

from __future__ import annotations

import pytest

from tools.reading import Reading, read

LONG = "def f(n):\n" + "    n += 1\n" * 16
"""A function of 17 lines."""


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("", {}),
        ("\n\n# a comment\n", {}),
        ('"""A docstring\nof two lines."""\n', {}),
        ("x = 1  # with a comment\n", {"code": 1}),
        ('x = """a text\n\nof three lines"""\n', {"code": 3}),
        ('x = 1\n"""What it is."""\n', {"code": 1}),
        ("call(\n    # which?\n    1,\n)\n", {"code": 3}),
    ],
)
def test_lines_of_code(source: str, counts: dict[str, int]) -> None:
    assert read(source).code == counts.get("code", 0)


@pytest.mark.parametrize(
    ("source", "nodes"),
    [
        ("", 1),  # the module
        ('"""A docstring."""\n', 1),
        ("x = 1\n", 4),  # module, assignment, name, number
        ("x = 1 + 2\n", 6),  # the operator is part of the operation
        ("x = not 1\n", 5),
        ("x = 1\n'''What it is.'''\n", 4),
    ],
)
def test_syntax_nodes(source: str, nodes: int) -> None:
    assert read(source).nodes == nodes


@pytest.mark.parametrize(
    ("source", "tuples"),
    [
        ("a, b = 1, 2\n", 1),
        ("a, b = b, a\n", 1),
        ("a = b = 1, 2\n", 0),
        ("a, b = pair()\n", 0),
        ("[a, b] = 1, 2\n", 0),
        ("for a, b in ((1, 2),):\n    a, b = 3, 4\n", 1),
    ],
)
def test_assignments_of_tuples(source: str, tuples: int) -> None:
    assert read(source).tuples == tuples


@pytest.mark.parametrize("text", ["That of a page.", "Whether it is.", "Up to n.", "  None if it."])
def test_a_fragment(text: str) -> None:
    assert read(f'def f(): """{text}"""\n').fragments == 1
    assert read(f'"""{text}"""\nclass A:\n    """{text}"""\n').fragments == 2


@pytest.mark.parametrize("text", ["Return that.", "Thatch.", "Nonempty.", "Upper bound.", ""])
def test_no_fragment(text: str) -> None:
    assert read(f'def f(): """{text}"""\n').fragments == 0


def test_a_long_function_without_a_docstring() -> None:
    assert read(LONG).undocumented == 0
    assert read(LONG + "    return n\n").undocumented == 1
    assert read(LONG.replace(":\n", ":\n    '''Count.'''\n")).undocumented == 0
    assert read("async " + LONG + "    return n\n").undocumented == 1
    assert read("@of_a_long_name\n" + LONG).undocumented == 0


def test_wide_lines() -> None:
    assert read("#" * 100 + "\n").wide == 0
    assert read("#" * 101 + "\n" + "#" * 101).wide == 2


def test_sums_and_rates() -> None:
    total = read("a, b = 1, 2\n") + read("x = 1\n")
    assert total == Reading(code=2, nodes=12, tuples=1)
    assert total.nodes_per_100 == 600
    assert total.tuples_per_1000 == 500
    assert Reading().nodes_per_100 == 0
