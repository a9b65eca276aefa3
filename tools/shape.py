"""Rules of shape: the size of functions and classes.

A rule has a maximum; a function or class above it is named with its number.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

__all__ = ["RULES", "Shape", "above_rules", "highest", "shapes"]

RULES = {
    "lines": 60,
    "parameters": 6,
    "public": 20,
    "fields": 12,
}
"""Lines and parameters of a function, public methods and annotated fields of a class."""

SETTINGS = {"CommandSettings", "ModelSettings", "ReplySettings", "Sampling", "ServerSettings"}
"""Classes whose fields are flags, one each."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Shape:
    """A size of a function or class, to which a rule applies."""

    name: str
    """A method has the name of its class before it."""
    rule: str
    number: int


def shapes(tree: ast.Module) -> Iterator[Shape]:
    """Yield the sizes of all functions, methods and classes of a module."""
    owners: dict[ast.stmt, str] = {}
    for node in ast.walk(tree):  # a class comes before its methods
        if isinstance(node, ast.ClassDef):
            owners |= dict.fromkeys(node.body, node.name)
            yield from shapes_of_class(node)
        elif isinstance(node, Function):
            owner = owners.get(node)
            name = f"{owner}.{node.name}" if owner is not None else node.name
            yield Shape(name, "lines", n_lines(node))
            yield Shape(name, "parameters", n_parameters(node))


def shapes_of_class(node: ast.ClassDef) -> Iterator[Shape]:
    """Yield the sizes of a class, but for one of settings."""
    if node.name in SETTINGS:
        return
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    yield Shape(node.name, "public", n_public(node))
    yield Shape(node.name, "fields", len(fields))


def n_lines(node: Function) -> int:
    """Return the number of lines from `def` to the end of the body."""
    last = node.end_lineno or node.lineno
    return last - node.lineno + 1


def n_parameters(node: Function) -> int:
    """Return the number of parameters, `self` and `cls` aside."""
    parameters = node.args
    positional = [arg.arg for arg in (*parameters.posonlyargs, *parameters.args)]
    if positional and positional[0] in ("self", "cls"):
        del positional[0]
    return len(positional) + len(parameters.kwonlyargs)


def n_public(node: ast.ClassDef) -> int:
    """Return the number of public methods and properties that the class itself defines."""
    names = {item.name for item in node.body if isinstance(item, Function)}
    public = [name for name in names if not name.startswith("_")]
    return len(public)


def above_rules(files: Iterable[Iterable[Shape]]) -> dict[str, int]:
    """Return the functions and classes above a rule: "name rule", number."""
    found: dict[str, int] = {}
    for shape in chain.from_iterable(files):
        if shape.number <= RULES[shape.rule]:
            continue
        key = f"{shape.name} {shape.rule}"
        found[key] = max(found.get(key, 0), shape.number)  # of two with one name, the larger
    return found


def highest(rule: str, files: Iterable[Iterable[Shape]]) -> int:
    """Return the highest number that a function or class has under a rule."""
    highest_yet = 0
    for shape in chain.from_iterable(files):
        if shape.rule == rule:
            highest_yet = max(highest_yet, shape.number)
    return highest_yet
