"""Names of a package and what they stand for, by its syntax trees: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Class", "Definition", "Function", "FunctionNode", "Module", "Package"]

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class Module:
    """A file, with the names that it defines and imports at its top or in a function."""

    name: str
    file: str
    """Path below the package's directory, with slashes."""
    tree: ast.Module
    definitions: dict[str, Class | Function] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Local name: (module, name there), or (module, "") for a module."""


@dataclass(frozen=True, eq=False)
class Class:
    """A class with its own methods."""

    module: Module
    node: ast.ClassDef
    methods: dict[str, Function] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.node.name

    def fields(self) -> dict[str, ast.expr]:
        """Return the annotations of the fields, in their order."""
        return {
            item.target.id: item.annotation
            for item in self.node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }


@dataclass(frozen=True, eq=False)
class Function:
    """A function of a module, or a method of ``owner``."""

    module: Module
    node: FunctionNode
    owner: Class | None = None

    @property
    def name(self) -> str:
        return f"{self.owner.name}.{self.node.name}" if self.owner else self.node.name

    def parameters(self) -> list[ast.arg]:
        """Return the parameters that a name or a position can fill, with `self`."""
        arguments = self.node.args
        return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]

    @property
    def has_body(self) -> bool:
        """True if there is more than a docstring and `...`, as in the methods of a port."""
        for statement in self.node.body:
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                return True
        return False

    @property
    def is_property(self) -> bool:
        return self._is_decorated_with("property")

    def takes_receiver(self, *, is_of_class: bool) -> bool:
        """Return whether a call fills the first parameter with what stands before the dot, an
        object or, if ``is_of_class``, a class.
        """
        if self.owner is None or self._is_decorated_with("staticmethod"):
            return False
        return not is_of_class or self._is_decorated_with("classmethod")

    def _is_decorated_with(self, name: str) -> bool:
        return any(ast.unparse(each).endswith(name) for each in self.node.decorator_list)


Definition = Class | Function | Module


class Package:
    """The modules of the package in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.modules: dict[str, Module] = {}
        self._attributes: dict[tuple[Class, str], Class | None] = {}
        for path in sorted(directory.rglob("*.py")):
            module = self._read(path, directory)
            self.modules[module.name] = module

    def _read(self, path: Path, directory: Path) -> Module:
        """Return the module of a file, with the names that it defines and imports."""
        inside = path.relative_to(directory)
        parts = [directory.name, *inside.with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        module = Module(name, inside.as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for statement in module.tree.body:
            if isinstance(statement, FunctionNode):
                module.definitions[statement.name] = Function(module, statement)
            elif isinstance(statement, ast.ClassDef):
                module.definitions[statement.name] = self._read_class(module, statement)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    module.imports[alias.asname or alias.name] = (node.module, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname:
                        module.imports[alias.asname] = (alias.name, "")
        return module

    def _read_class(self, module: Module, node: ast.ClassDef) -> Class:
        owner = Class(module, node)
        for item in node.body:
            if isinstance(item, FunctionNode):
                owner.methods.setdefault(item.name, Function(module, item, owner))
        return owner

    def functions(self) -> Iterator[Function]:
        """Yield all functions of modules and all methods of their classes."""
        for module in self.modules.values():
            for each in module.definitions.values():
                if isinstance(each, Function):
                    yield each
                else:
                    yield from each.methods.values()

    def find(self, name: str, parameter: str) -> Function:
        """Return the one function or method called ``name`` that has the parameter, wherever it is.

        Raises LookupError if there is none, or more than one.
        """
        found = [
            each
            for each in self.functions()
            if each.name == name and parameter in [arg.arg for arg in each.parameters()]
        ]
        if len(found) != 1:
            places = ", ".join(each.module.file for each in found) or "no file"
            raise LookupError(f"{name} with a parameter {parameter}: found in {places}")
        return found[0]

    def resolve(self, module: Module, name: str) -> Definition | None:
        """Return what ``name`` stands for in ``module``; None unless the package defines it."""
        if name in module.definitions:
            return module.definitions[name]
        if name not in module.imports:
            return None
        origin, name_there = module.imports[name]
        submodule = f"{origin}.{name_there}" if name_there else origin
        if submodule in self.modules:
            return self.modules[submodule]
        if origin not in self.modules or self.modules[origin] is module:
            return None
        return self.resolve(self.modules[origin], name_there)

    def family(self, owner: Class) -> Iterator[Class]:
        """Yield the class and its base classes in the order in which Python looks for a method."""
        yield owner
        for base in owner.node.bases:
            found = self.class_named_in(owner.module, base)
            if found is not None and found is not owner:
                yield from self.family(found)

    def method(self, owner: Class, name: str) -> Function | None:
        """Return the method called ``name`` of the class or of its bases."""
        for each in self.family(owner):
            if name in each.methods:
                return each.methods[name]
        return None

    def class_named_in(self, module: Module, annotation: ast.expr | None) -> Class | None:
        """Return the first class of the package that an annotation names.

        `Worker | None` and `list[Worker]` name `Worker`: an item of a list has the same methods
        wherever it is.
        """
        if annotation is None or "Callable" in ast.unparse(annotation):
            return None
        for node in ast.walk(annotation):
            found = None
            if isinstance(node, ast.Name):
                found = self.resolve(module, node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                outer = self.resolve(module, node.value.id)
                found = self.resolve(outer, node.attr) if isinstance(outer, Module) else None
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = self.resolve(module, node.value)
            if isinstance(found, Class):
                return found
        return None

    def result_class(self, function: Function) -> Class | None:
        """Return the class that the annotation of the result names."""
        annotation = function.node.returns
        if isinstance(annotation, ast.Name) and annotation.id == "Self":
            return function.owner
        return self.class_named_in(function.module, annotation)

    def attribute_class(self, owner: Class, name: str) -> Class | None:
        """Return the class of an attribute, by its annotation or by what a method assigns to it."""
        key = (owner, name)
        if key not in self._attributes:
            self._attributes[key] = None  # ends a circle of attributes
            self._attributes[key] = self._find_attribute_class(owner, name)
        return self._attributes[key]

    def _find_attribute_class(self, owner: Class, name: str) -> Class | None:
        """Return the class that the first annotation or assignment of the attribute has."""
        for each in self.family(owner):
            if name in each.fields():
                return self.class_named_in(each.module, each.fields()[name])
            if name in each.methods:
                return self.result_class(each.methods[name])
            for method in each.methods.values():
                found = self._class_given_in(method, name)
                if found is not None:
                    return found
        return None

    def _class_given_in(self, method: Function, name: str) -> Class | None:
        """Return the class of the value that a method assigns to `self.name`."""
        for node in ast.walk(method.node):
            if isinstance(node, ast.AnnAssign) and is_own_attribute(node.target, name):
                return self.class_named_in(method.module, node.annotation)
            if not isinstance(node, ast.Assign):
                continue
            for target, value in assigned_pairs(node):
                if is_own_attribute(target, name):
                    return self._assigned_class(method, value)
        return None

    def _assigned_class(self, method: Function, value: ast.expr) -> Class | None:
        """Return the class of an expression in a method: a parameter, a call, or an attribute."""
        if isinstance(value, ast.Name):
            if value.id == "self":
                return method.owner
            for each in method.parameters():
                if each.arg == value.id:
                    return self.class_named_in(method.module, each.annotation)
            return None
        if isinstance(value, ast.Attribute):
            owner = self._assigned_class(method, value.value)
            return self.attribute_class(owner, value.attr) if owner is not None else None
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            called = self.resolve(method.module, value.func.id)
            if isinstance(called, Function):
                return self.result_class(called)
            return called if isinstance(called, Class) else None
        if isinstance(value, ast.IfExp):
            choices = [value.body, value.orelse]
        elif isinstance(value, ast.BoolOp):
            choices = value.values
        else:
            return None
        classes = [self._assigned_class(method, each) for each in choices]
        return next((each for each in classes if each is not None), None)


def assigned_pairs(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """Return the targets of an assignment with their values, one by one where it has several."""
    first = node.targets[0]
    if isinstance(first, ast.Tuple) and isinstance(node.value, ast.Tuple):
        return list(zip(first.elts, node.value.elts, strict=False))
    return [(target, node.value) for target in node.targets]


def is_own_attribute(target: ast.expr, name: str) -> bool:
    """Return whether ``target`` is `self.name`."""
    return (
        isinstance(target, ast.Attribute)
        and target.attr == name
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    )
