"""Every flag sets a field of the settings, and a part of the program reads the field.

A reader is found by types, as annotations give them, so a field of the same name in another class
does not count. How a value acts is for the tests of its reader; that each flag fills its field, for
test_flags.py.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import TypeAlias

import pytest

from pyctl.cli.arguments import OWNERS
from pyctl.settings.setting import class_flags
from tools.house import modules, tree_of

SETTLED = {"InfoFlags", "FlagAliases", "key_file"}
"""Classes and a field that `arguments` makes into others: their names stand there as texts."""

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function]]:
    """Yield every function of the package, with its class or ""."""
    for path in modules().values():
        for owner in ast.walk(tree_of(path)):
            if isinstance(owner, (ast.Module, ast.ClassDef)):
                of_class = getattr(owner, "name", "")
                yield from ((of_class, node) for node in owner.body if isinstance(node, Function))


def assignments(function: Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target with its value, also those of ``a, b = x, y``."""
    found = (node for node in ast.walk(function) if isinstance(node, ast.Assign))
    for node in found:
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=True)
            else:
                yield target, node.value


def replaced(function: Function) -> Iterator[ast.AST]:
    """Yield reads of a field for its own new value, as in ``replace(settings, n=min(settings.n,
    5))``: none to count.
    """
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "replace"
        ):
            for given in node.keywords:
                yield from (
                    part
                    for part in ast.walk(given.value)
                    if getattr(part, "attr", None) == given.arg
                )


class Classes:
    """The classes of expressions, as far as annotations and plain assignments tell; "" where they
    do not.
    """

    def __init__(self) -> None:
        """Collect the annotated members, results and bases of all classes, and the attributes that
        constructors assign.
        """
        trees = map(tree_of, modules().values())
        nodes = [
            node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
        ]
        self.members: dict[str, dict[str, str]] = {node.name: {} for node in nodes}
        self.results: dict[str, str] = {}
        for node in nodes:
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    self.members[node.name][item.target.id] = self.annotated(item.annotation)
        self.bases = {
            node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
            for node in nodes
        }
        for owner, function in functions():
            of_owner = self.members[owner] if owner else self.results
            of_owner[function.name] = self.annotated(function.returns)
        for owner, function in functions():
            if function.name == "__init__":
                names = self.names(owner, function)
                for target, value in assignments(function):
                    if isinstance(target, ast.Attribute):
                        self.members[owner].setdefault(target.attr, self.of(value, names))

    def annotated(self, annotation: ast.expr | None) -> str:
        named = [
            node.id
            for node in ast.walk(annotation or ast.Constant(""))
            if isinstance(node, ast.Name)
        ]
        return next((name for name in named if name in self.members), "")

    def names(self, owner: str, function: Function) -> dict[str, str]:
        """Return the classes of the names in ``function``."""
        arguments = [node for node in ast.walk(function) if isinstance(node, ast.arg)]
        names = {node.arg: self.annotated(node.annotation) for node in arguments} | {"self": owner}
        for target, value in assignments(function):
            if isinstance(target, ast.Name) and (found := self.of(value, names)):
                names[target.id] = found
        return names

    def member(self, owner: str, name: str) -> str:
        """Return the class of a member, be it one of a base class."""
        inherited = (self.member(base, name) for base in self.bases.get(owner, ()))
        return self.members.get(owner, {}).get(name, "") or next(filter(None, inherited), "")

    def of(self, node: ast.expr, names: dict[str, str]) -> str:
        match node:
            case ast.Name(id=name):
                return name if name in self.members else names.get(name, "")
            case ast.Attribute(value=value, attr=name):
                return self.member(self.of(value, names), name)
            case ast.Call(func=ast.Name(id="replace"), args=[value, *_]):
                return self.of(value, names)
            case ast.Call(func=ast.Name(id=name)) if name in self.results:
                return self.results[name]
            case ast.Call(func=function):
                return self.of(function, names)
            case ast.BoolOp(values=[value, *_]) | ast.IfExp(body=value):
                return self.of(value, names)
        return ""


def read_fields() -> set[tuple[str, str]]:
    """Return class and name of each attribute that another class or a function reads, be it by a
    method of its own class.
    """
    classes = Classes()
    readers: dict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
    for owner, function in functions():
        names = classes.names(owner, function)
        handed_back = set(replaced(function))
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Load)
                and node not in handed_back
            ):
                of_class = classes.of(node.value, names)
                readers[of_class, node.attr].add((owner, function.name))

    read = {item for item, by in readers.items() if any(owner != item[0] for owner, _ in by)}
    while more := {item for item, by in readers.items() if item not in read and by & read}:
        read |= more
    return read


READ = read_fields()
TEXTS = {
    node.value
    for node in ast.walk(tree_of(modules()["pyctl.cli.arguments"]))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
}


@pytest.mark.parametrize("owner", OWNERS)
def test_every_flag_sets_a_field_that_is_read(owner: type[object]) -> None:
    name = owner.__name__
    flagged = {flag.dest for _, flag in class_flags(owner)}
    settled = {field for field in flagged & TEXTS if SETTLED & {name, field}}
    assert {field for field in flagged - settled if (name, field) not in READ} == set()
