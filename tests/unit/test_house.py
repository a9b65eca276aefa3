"""The source gets no harder to read: no measure of `tools.house` rises by over 2 %."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import house, ratchet
from tools.definitions import Package
from tools.house import FRAGMENTS, NODES, SHAPE, TUPLES, UNDOCUMENTED, UNTESTED, WIDE
from tools.ratchet import Numbers
from tools.routes import PARAMETERS, follow

CLEAR = '"""Add two numbers."""\n\n\ndef add(a, b):\n    """Return the sum."""\n    return a + b\n'
LONG = "def count(n):\n" + "    n += 1\n" * 16 + "    return n\n"


def test_no_measure_rises() -> None:
    rises = ratchet.rises(ratchet.load(), house.measure())
    assert [str(rise) for rise in rises] == [], "see CONTRIBUTING.md, Measures"


def test_each_kept_number_is_one_that_is_measured() -> None:
    kept, numbers = ratchet.load(), house.measure()
    assert kept.keys() == numbers.keys()
    for measure, by_place in kept.items():
        if measure != SHAPE:  # what is no longer above a rule need not be struck out at once
            assert by_place.keys() <= numbers[measure].keys()


@pytest.mark.parametrize(
    ("measure", "source"),
    [
        (
            NODES,
            CLEAR + "\n\nPAIRS = {n: [a for a in (n, -n) if a % 2 or a > 7] for n in (1, 2)}\n",
        ),
        (TUPLES, CLEAR + "\n\na, b = 1, 2\n"),
        (FRAGMENTS, CLEAR.replace("Return the sum.", "That of two numbers.")),
        (UNDOCUMENTED, CLEAR + "\n\n" + LONG),
        (WIDE, CLEAR + "# " + "wide " * 20 + "\n"),
        (UNTESTED, CLEAR + "# a line\n" * 60),
    ],
)
def test_a_bad_source_is_a_rise(tmp_path: Path, measure: str, source: str) -> None:
    clear, bad = (tmp_path / name for name in ("no_module_1.py", "no_module_2.py"))
    clear.write_text(CLEAR, encoding="utf-8")
    bad.write_text(source, encoding="utf-8")
    before = {measure: {"place": house.row_of([clear])[measure]}}
    after = {measure: {"place": house.row_of([bad])[measure]}}
    assert ratchet.rises(before, before) == []
    assert [rise.measure for rise in ratchet.rises(before, after)] == [measure]


def test_means_are_the_lines_outside_test_functions(tmp_path: Path) -> None:
    source = """import pytest

def made():
    return 7

@pytest.mark.parametrize("n", [7])
def test_made(n):
    assert made() == n
"""
    path = tmp_path / "test_made.py"
    path.write_text(source, encoding="utf-8")
    assert house.share_of_means([path]) == 62.5, "five of eight lines"


def test_a_longer_route_is_a_rise(tmp_path: Path) -> None:
    (tmp_path / "far.py").write_text("def far(x): return\n", encoding="utf-8")
    stays = []
    for body in ("own(x)", "own(x)\n    far(x)"):
        source = (
            f"from {tmp_path.name}.far import far\ndef start(x):\n    {body}\ndef own(y): return\n"
        )
        (tmp_path / "near.py").write_text(source, encoding="utf-8")
        stays.append(len(follow(Package(tmp_path), "start:x").stays))
    assert stays == [1, 2]


def test_routes_of_the_package_pass_several_files() -> None:
    numbers = house.measure()[house.STAYS]
    assert numbers.keys() == {*PARAMETERS}
    assert min(numbers.values()) > 3, "a parameter that is lost at once is no short route"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Numbers in a file of the test's own: one is lower than today's, one is higher."""
    file = tmp_path / "house.json"
    ratchet.keep({NODES: {"pyctl": 400, "tests": 700}}, file)
    return file


def today() -> Numbers:
    return {NODES: {"pyctl": 500, "tests": 600}}


def test_keeping_lowers_numbers_and_names_what_rose(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert house.main(["--keep"], today, kept) == 1
    assert json.loads(kept.read_text("utf-8")) == {NODES: {"pyctl": 400, "tests": 600}}
    assert capsys.readouterr().out == f"{NODES}, pyctl: 500, and 400 is kept\n"


def test_raising_sets_all(kept: Path) -> None:
    assert house.main(["--raise"], today, kept) == 0
    assert json.loads(kept.read_text("utf-8")) == {NODES: {"pyctl": 500, "tests": 600}}
    assert house.main(["--keep"], today, kept) == 0


def test_the_report_has_a_line_for_each_place_and_stay(capsys: pytest.CaptureFixture[str]) -> None:
    assert house.main(["--routes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = {line.split()[0] for line in lines if line}
    assert {*house.places()} <= heads
    assert any(" PrefixCache.restore" in line for line in lines)


def test_lines_of_a_package_count_its_page_and_stubs() -> None:
    lines = house.lines()
    page = house.PACKAGE / "page"
    assert lines["pyctl/page"] > house.n_lines(page.rglob("*.py")) + house.n_lines(
        page.rglob("*.js")
    )
    inside = sum(n for place, n in lines.items() if place.startswith("pyctl/"))
    stubs = house.n_lines(house.PACKAGE.glob("*.pyi"))
    assert lines["pyctl"] == inside + house.n_lines(house.PACKAGE.glob("*.py")) + stubs
