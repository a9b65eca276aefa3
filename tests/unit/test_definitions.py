"""Names are found where they are defined, through imports, bases and annotations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.definitions import Class, Function, Module, Package

FILES = {
    "__init__.py": "from house.rooms.hall import Hall as Entrance\n",
    "door.py": "class Door:\n    def open(self, key): ...\n\ndef open(key): ...\n",
    "rooms/__init__.py": "",
    "rooms/hall.py": """
from typing import Self

from house import door
from house.door import Door

class Room:
    height: "Height | None"
    doors: list[Door]
    on_enter: Callable[[Door], None]

    def __init__(self, front: Door, other):
        self.front = front
        self.back = Door()
        self.side: Door | None = None
        self.either = other or front
        self.key = self.front
        self.other = other
        self.left, self.right = front, other

    @property
    def main(self) -> Door: ...

    @classmethod
    def made(cls, front) -> Self: ...

    @staticmethod
    def measured(room): ...

class Hall(Room):
    def enter(self, key): ...
""",
}


@pytest.fixture
def package(tmp_path: Path) -> Package:
    for name, source in FILES.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return Package(tmp_path / "house")


def class_named(package: Package, module: str, name: str) -> Class:
    found = package.resolve(package.modules[module], name)
    assert isinstance(found, Class)
    return found


def test_names_are_resolved_through_imports(package: Package) -> None:
    assert class_named(package, "house", "Entrance").name == "Hall"
    assert class_named(package, "house.rooms.hall", "Door").module.file == "door.py"
    hall = package.modules["house.rooms.hall"]
    assert isinstance(package.resolve(hall, "door"), Module)
    assert package.resolve(hall, "Callable") is None
    assert package.resolve(hall, "nowhere") is None


def test_methods_are_found_in_bases(package: Package) -> None:
    hall = class_named(package, "house", "Entrance")
    assert [each.name for each in package.family(hall)] == ["Hall", "Room"]
    made = package.method(hall, "made")
    assert made is not None
    assert made.name == "Room.made"
    assert package.method(hall, "open") is None


@pytest.mark.parametrize(
    ("attribute", "kind"),
    [
        ("doors", "Door"),
        ("front", "Door"),
        ("back", "Door"),
        ("side", "Door"),
        ("either", "Door"),
        ("key", "Door"),
        ("main", "Door"),
        ("left", "Door"),
        ("right", None),
        ("other", None),
        ("height", None),
        ("on_enter", None),
    ],
)
def test_classes_of_attributes(package: Package, attribute: str, kind: str | None) -> None:
    hall = class_named(package, "house", "Entrance")
    found = package.attribute_class(hall, attribute)
    assert (found.name if found is not None else None) == kind


def test_what_stands_before_the_dot_is_a_parameter(package: Package) -> None:
    methods = class_named(package, "house.rooms.hall", "Room").methods
    assert methods["__init__"].takes_receiver(is_of_class=False)
    assert not methods["__init__"].takes_receiver(is_of_class=True)
    assert methods["made"].takes_receiver(is_of_class=True)
    assert not methods["measured"].takes_receiver(is_of_class=False)
    assert methods["main"].is_property
    assert not methods["main"].has_body
    assert methods["__init__"].has_body
    assert not methods["made"].is_property


def test_a_result_is_of_the_class_that_its_annotation_names(package: Package) -> None:
    room = class_named(package, "house.rooms.hall", "Room")
    assert package.result_class(room.methods["made"]) is room
    assert package.result_class(room.methods["measured"]) is None


def test_a_function_is_found_by_name_and_parameter(package: Package) -> None:
    found = package.find("Hall.enter", "key")
    assert isinstance(found, Function)
    assert found.module.file == "rooms/hall.py"
    with pytest.raises(LookupError, match=r"Hall\.enter with a parameter door: found in no file"):
        package.find("Hall.enter", "door")
