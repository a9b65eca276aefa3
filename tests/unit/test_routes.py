"""A parameter is followed through calls, attributes, copies and objects that hold it."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest

from tools.definitions import Package
from tools.routes import Route, follow, table

HELPERS = """
class Port:
    def send(self, value): ...

class Box:
    def __init__(self, value, label=""):
        self._value = value
        self.label = label

    @property
    def content(self):
        return self._value

    def sent(self, port: Port):
        port.send(self._value)

    def name(self):
        return self.label

class Row:
    value: str
    index: int

def take(value):
    return None

def same(value):
    return value

def count(value) -> int:
    return len(value) + 1
"""

IMPORTS = """
from house import helpers
from house.helpers import Box, Port, Row, count, same, take

"""


def followed(tmp_path: Path, body: str) -> Route:
    """Return the route of ``value`` through a function of this body, in a package of two files."""
    package = tmp_path / "house"
    package.mkdir()
    (package / "helpers.py").write_text(HELPERS, encoding="utf-8")
    start = f"{IMPORTS}def start(value, port: Port):\n{indent(body, '    ')}\n"
    (package / "start.py").write_text(start, encoding="utf-8")
    return follow(Package(package), "start:value")


@pytest.mark.parametrize(
    ("body", "entered"),
    [
        ("take(value)", ["take"]),
        ("take(value.part[0])", ["take"]),
        ("take(other)", []),
        ("take(len(value))", []),
        ("take(value.size + 1)", []),
        ("other = value\ntake(value=other)", ["take"]),
        ("value = None\ntake(value)", []),
        ("a, b = value, 1\ntake(b)", []),
        ("a, b = value, 1\ntake(a)", ["take"]),
        ("if port:\n    x = value\nelse:\n    x = None\ntake(x)", ["take"]),
        ("for each in value:\n    take(each)", ["take"]),
        ("[take(each) for each in value if each]", ["take"]),
        ("take(replace(value, n=1))", ["take"]),
        ("take(list(value))", ["take"]),
        ("take(str(value))", []),
        ("helpers.take(value)", ["take"]),
        ("partial(take, value)", ["take"]),
        ("x = lambda: take(value)", ["take"]),
        ("def inner(value):\n    take(value)", []),
        ("def inner(other):\n    take(value)", ["take"]),
        ("take(same(value))", ["same", "take"]),
        ("take(count(value))", ["count"]),
        ("take(unknown(value))", []),
        ("with value.lock() as held:\n    take(held)", ["take"]),
        ("port.send(value)", []),
        ("take(port.send(value))", []),
        ("unknown.send(value)", []),
        ("value.run()", []),
    ],
)
def test_what_is_handed_on(tmp_path: Path, body: str, entered: list[str]) -> None:
    first, *others = followed(tmp_path, body).entries
    assert first.function == "start"
    assert [each.function for each in others] == entered


@pytest.mark.parametrize(
    ("body", "entered"),
    [
        ("box = Box(value)\ntake(box.content)", ["Box.__init__", "Box.content", "take"]),
        ("box = Box(value)\nbox.sent(port)", ["Box.__init__", "Box.sent"]),
        ("box = Box(value)\nbox.name()", ["Box.__init__"]),
        ("box = Box(port, value)\nbox.name()", ["Box.__init__", "Box.name"]),
        ("row = Row(value, 3)\ntake(row.value)\ntake(row.index)", ["take"]),
    ],
)
def test_an_object_holds_it(tmp_path: Path, body: str, entered: list[str]) -> None:
    _, *others = followed(tmp_path, body).entries
    assert [each.function for each in others] == entered


def test_calls_into_one_file_are_one_stay(tmp_path: Path) -> None:
    route = followed(tmp_path, "take(value)\nsame(value)\ntake(value)")
    assert [(file, len(entries)) for file, entries in route.stays] == [
        ("start.py", 1),
        ("helpers.py", 3),
    ]
    assert route.n_returns == 0


def test_a_return_to_a_file_is_counted(tmp_path: Path) -> None:
    package = tmp_path / "house"
    package.mkdir()
    (package / "__init__.py").write_text("", "utf-8")
    (package / "a.py").write_text(
        "from house.b import near, far\n"
        "def start(value):\n    near(value)\n    own(value)\n    far(value)\n"
        "def own(value):\n    start(value)\n",
        "utf-8",
    )
    (package / "b.py").write_text("def near(x): return\ndef far(x): return\n", "utf-8")
    route = follow(Package(package), "start:value")
    assert [file for file, _ in route.stays] == ["a.py", "b.py", "a.py", "b.py"]
    assert route.n_returns == 2
    assert route.visits == {"a.py": 2, "b.py": 2}
    assert table({"start:value": route})[1].split() == ["start:value", "4", "2", "2", "2", "(a.py)"]


def test_an_unknown_parameter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="start with a parameter value"):
        follow(Package(tmp_path), "start:value")
