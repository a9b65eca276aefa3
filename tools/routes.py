"""Follow one parameter from call to call, by its syntax, and list the files that it passes.

python -m tools.routes [FUNCTION:PARAMETER ...]

The parameter enters a function as an argument: the parameter itself, an attribute or an item of it,
a copy, or an object that was constructed with it. Each such call is an entry, in the order in which
the code is written; of branches all are taken, one after the other. Consecutive entries into one
file are a stay; a later stay in the same file is a return. A function is read once for each set of
parameters by which the value enters; a later call of that kind is an entry and ends there.

- A callee is found by its name, or by the class of the object whose method it is. Annotations of
  parameters, attributes and results name that class; a method of an object of unknown class is not
  followed. A method without a body, as a port has, is no entry: its contract is read at the call.
- A method of the parameter itself is no entry: the value is not handed on. A method of an object
  that holds the parameter is one if it reads what the object holds.
- Numbers computed from the parameter, and texts that contain it, are other values.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path

from tools.definitions import Class, Definition, Function, FunctionNode, Module, Package

__all__ = ["PARAMETERS", "Route", "follow", "followed"]

PACKAGE = Path(__file__).resolve().parents[1] / "pyctl"

PARAMETERS = (
    "PrefixCache.restore:lookup",
    "load:settings",
    "assemble:settings",
    "prepare:body",
)
"""A restore, a flag on its way to llama.cpp and to the composed server, and a request's body."""

COPIES = {
    "cast",
    "copy",
    "deepcopy",
    "dict",
    "enumerate",
    "iter",
    "list",
    "next",
    "replace",
    "reversed",
    "set",
    "sorted",
    "tuple",
    "zip",
}
"""Functions of Python whose result holds their arguments."""

MAX_ENTRIES = 5000
"""A route of the package has up to a few hundred; more is a defect of the follower."""


@dataclass(frozen=True)
class Entry:
    """A call that hands the value on."""

    file: str
    function: str


@dataclass(frozen=True)
class Route:
    """All entries of one parameter."""

    entries: tuple[Entry, ...]

    @property
    def stays(self) -> list[tuple[str, list[Entry]]]:
        """The files in the order in which they are entered, with the entries of each stay."""
        return [(file, list(some)) for file, some in groupby(self.entries, lambda each: each.file)]

    @property
    def visits(self) -> Counter[str]:
        """The number of stays in each file."""
        return Counter(file for file, _ in self.stays)

    @property
    def most_visited(self) -> tuple[str, int]:
        """The file with the most stays, and their number."""
        return self.visits.most_common(1)[0]

    @property
    def n_returns(self) -> int:
        return len(self.stays) - len(self.visits)


@dataclass(eq=False)
class Value:
    """The value of an expression.

    ``carries`` is true of the parameter, its parts and its copies; ``parts`` are the attributes by
    which another object holds it.
    """

    kind: Class | None = None
    carries: bool = False
    parts: dict[str, Value] = field(default_factory=dict)
    definition: Definition | None = None
    """The class, function or module that a name stands for."""

    @property
    def is_followed(self) -> bool:
        return self.carries or bool(self.parts)


def joined(values: Iterable[Value]) -> Value:
    """Return a value that holds what each of ``values`` holds."""
    found = Value()
    for each in values:
        found.kind = found.kind or each.kind
        found.carries |= each.carries
        found.parts |= each.parts
    return found


class _Follower:
    """Reads functions of a package as the value enters them."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self.entries: list[Entry] = []
        self._results: dict[tuple[Function, frozenset[str]], Value] = {}
        self._ignoring: set[tuple[Function, frozenset[str]]] = set()
        """Calls whose function gets an object that holds the value, and never reads it."""

    def enter(self, function: Function, arguments: dict[str, Value]) -> Value:
        """Record a call by which the value enters; return the result of the call.

        Raises RecursionError if the route grows beyond `MAX_ENTRIES`.
        """
        if not function.has_body:
            return Value(self.package.result_class(function))
        if len(self.entries) == MAX_ENTRIES:
            raise RecursionError(f"{function.name}: a route of over {MAX_ENTRIES} calls")
        names = frozenset(name for name, value in arguments.items() if value.is_followed)
        key = (function, names)
        self.entries.append(Entry(function.module.file, function.name))
        if key not in self._results:
            self._results[key] = self._read(function, arguments, key)
        if key in self._ignoring:
            self.entries.pop()
        return self._results[key]

    def _read(
        self,
        function: Function,
        arguments: dict[str, Value],
        key: tuple[Function, frozenset[str]],
    ) -> Value:
        # A recursive call inside gets the class of the result, and nothing that it holds.
        self._results[key] = Value(self.package.result_class(function))
        n_entries = len(self.entries)
        reader = _Reader(self, function, arguments)
        result = reader.result()
        is_handed_over = any(each.carries for each in arguments.values())
        if not (is_handed_over or reader.has_read or len(self.entries) > n_entries):
            self._ignoring.add(key)
        return result


class _Reader(ast.NodeVisitor):
    """Reads one function in the order in which it is written.

    Each visit of an expression returns its `Value`; a statement binds names.
    """

    def __init__(
        self, follower: _Follower, function: Function, arguments: dict[str, Value]
    ) -> None:
        self._follower = follower
        self._package = follower.package
        self._function = function
        self._names = dict(arguments)
        self._returned: list[Value] = []
        self.has_read = False
        """True if an attribute that holds the value was read."""
        for each in function.parameters():
            value = self._names.setdefault(each.arg, Value())
            kind = function.owner if each.arg == "self" else self._class_named_in(each.annotation)
            value.kind = value.kind or kind

    def result(self) -> Value:
        """Read the function and return its result, or the new object if it is a constructor."""
        for statement in self._function.node.body:
            self.visit(statement)
        if self._function.node.name == "__init__":
            return self._names["self"]
        result = joined(self._returned)
        result.kind = result.kind or self._package.result_class(self._function)
        return result

    def visit(self, node: ast.AST) -> Value:
        """Return the value of an expression; a statement has an empty one."""
        value = super().visit(node)
        return value if isinstance(value, Value) else Value()

    def _class_named_in(self, annotation: ast.expr | None) -> Class | None:
        return self._package.class_named_in(self._function.module, annotation)

    # Statements.

    def _bind(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = value
        elif isinstance(target, ast.Attribute):
            holder = self.visit(target.value)
            holder.parts.pop(target.attr, None)
            if value.is_followed:
                holder.parts[target.attr] = value
        elif isinstance(target, ast.Starred):
            self._bind(target.value, value)
        elif isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._bind(each, Value(carries=value.carries))

    def visit_Assign(self, node: ast.Assign) -> None:
        first = node.targets[0]
        if isinstance(first, ast.Tuple) and isinstance(node.value, ast.Tuple):
            values = [self.visit(each) for each in node.value.elts]
            for target, value in zip(first.elts, values, strict=False):
                self._bind(target, value)
            return
        value = self.visit(node.value)
        for target in node.targets:
            self._bind(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        value = self.visit(node.value) if node.value is not None else Value()
        value.kind = value.kind or self._class_named_in(node.annotation)
        self._bind(node.target, value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Value:
        value = self.visit(node.value)
        self._bind(node.target, value)
        return value

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._bind(node.target, self.visit(node.iter))
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    visit_AsyncFor = visit_For

    def visit_withitem(self, node: ast.withitem) -> None:
        value = self.visit(node.context_expr)
        if node.optional_vars is not None:
            self._bind(node.optional_vars, value)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        before = dict(self._names)
        for statement in node.body:
            self.visit(statement)
        names_of_body = self._names
        self._names = before
        for statement in node.orelse:
            self.visit(statement)
        for name, value in names_of_body.items():
            other = self._names.get(name, value)
            self._names[name] = value if other is value else joined((value, other))

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self._returned.append(self.visit(node.value))

    def visit_Yield(self, node: ast.Yield) -> None:
        if node.value is not None:
            self._returned.append(self.visit(node.value))

    def visit_FunctionDef(self, node: FunctionNode) -> None:
        """Read an inner function at its definition; its parameters are other values."""
        outside = dict(self._names)
        for each in Function(self._function.module, node).parameters():
            self._names[each.arg] = Value(self._class_named_in(each.annotation))
        returned = len(self._returned)
        for statement in node.body:
            self.visit(statement)
        del self._returned[returned:]
        self._names = outside
        self._names[node.name] = Value(definition=Function(self._function.module, node))

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Leave an inner class out."""

    # Expressions.

    def generic_visit(self, node: ast.AST) -> Value:
        """Read the parts of a node whose value is another one, such as a comparison."""
        super().generic_visit(node)
        return Value()

    def _visit_parts(self, node: ast.AST) -> Value:
        """Return a value that holds what the parts hold."""
        return joined([self.visit(each) for each in ast.iter_child_nodes(node)])

    visit_List = visit_Tuple = visit_Set = visit_Dict = _visit_parts
    visit_BoolOp = visit_Starred = visit_Await = visit_YieldFrom = _visit_parts

    def visit_IfExp(self, node: ast.IfExp) -> Value:
        self.visit(node.test)
        return joined((self.visit(node.body), self.visit(node.orelse)))

    def visit_Subscript(self, node: ast.Subscript) -> Value:
        value = self.visit(node.value)
        self.visit(node.slice)
        return value

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Value:
        return self._visit_comprehension(node.generators, node.elt)

    visit_SetComp = visit_GeneratorExp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> Value:
        return self._visit_comprehension(node.generators, node.key, node.value)

    def _visit_comprehension(
        self, generators: Sequence[ast.comprehension], *items: ast.expr
    ) -> Value:
        outside = dict(self._names)
        for each in generators:
            self._bind(each.target, self.visit(each.iter))
            for condition in each.ifs:
                self.visit(condition)
        value = joined([self.visit(item) for item in items])
        self._names = outside
        return value

    def visit_Lambda(self, node: ast.Lambda) -> Value:
        outside = dict(self._names)
        self._names |= {each.arg: Value() for each in node.args.args}
        self.visit(node.body)
        self._names = outside
        return Value()

    def visit_Name(self, node: ast.Name) -> Value:
        if node.id in self._names:
            return self._names[node.id]
        return Value(definition=self._package.resolve(self._function.module, node.id))

    def visit_Attribute(self, node: ast.Attribute) -> Value:
        holder = self.visit(node.value)
        if isinstance(holder.definition, Module):
            return Value(definition=self._package.resolve(holder.definition, node.attr))
        if node.attr in holder.parts:
            self.has_read = True
            return holder.parts[node.attr]
        if holder.kind is None or holder.carries:
            return Value(self._attribute_class(holder, node.attr), holder.carries)
        method = self._package.method(holder.kind, node.attr)
        if method is not None and method.is_property and holder.parts:
            return self._follower.enter(method, {"self": holder})
        return Value(self._attribute_class(holder, node.attr))

    def _attribute_class(self, holder: Value, name: str) -> Class | None:
        if holder.kind is None:
            return None
        return self._package.attribute_class(holder.kind, name)

    # Calls.

    def visit_Call(self, node: ast.Call) -> Value:
        """Enter the callee, if the package defines it and an argument holds the value."""
        name = called_name(node)
        if name == "super":
            return self._super()
        receiver, callee = self._callee(node.func)
        arguments = [self.visit(each) for each in node.args]
        keywords: dict[str, Value] = {}
        for each in node.keywords:
            keywords[each.arg or "**"] = self.visit(each.value)
        if name == "partial" and node.args:
            receiver, callee = self._callee(node.args[0])
            del arguments[0]
        if isinstance(callee, Class):
            return self._construct(callee, arguments, keywords)
        if isinstance(callee, Function):
            return self._call(callee, receiver, arguments, keywords)
        if name in COPIES:
            return joined((*arguments, *keywords.values()))
        return Value(carries=receiver.carries)

    def _super(self) -> Value:
        """Return the object itself, as one of its first base class."""
        own = self._names.get("self", Value())
        if own.kind is None:
            return own
        classes = [*self._package.family(own.kind)]
        return Value(classes[1] if len(classes) > 1 else None, own.carries, own.parts)

    def _callee(self, called: ast.expr) -> tuple[Value, Definition | None]:
        """Return the object whose method is called, and the callee, as far as they are known."""
        if not isinstance(called, ast.Attribute):
            value = self.visit(called)
            return Value(), value.definition
        holder = self.visit(called.value)
        if isinstance(holder.definition, Module):
            return Value(), self._package.resolve(holder.definition, called.attr)
        owner = holder.definition if isinstance(holder.definition, Class) else holder.kind
        method = self._package.method(owner, called.attr) if owner is not None else None
        return holder, method

    def _construct(self, owner: Class, arguments: list[Value], keywords: dict[str, Value]) -> Value:
        """Return a new object that holds what the arguments hold."""
        constructor = self._package.method(owner, "__init__")
        if constructor is not None:
            return self._call(constructor, Value(owner), arguments, keywords)
        names: list[str] = []
        for each in self._package.family(owner):
            names = [*each.fields(), *names]  # a base class has the first fields
        made = Value(owner)
        given = dict(zip(names, arguments, strict=False)) | keywords
        for name, value in given.items():
            if value.is_followed:
                made.parts[name] = value
        return made

    def _call(
        self,
        function: Function,
        receiver: Value,
        arguments: list[Value],
        keywords: dict[str, Value],
    ) -> Value:
        """Enter ``function`` if an argument holds the value; return the result."""
        is_handed_on = any(each.is_followed for each in (*arguments, *keywords.values()))
        if not is_handed_on and (receiver.carries or not receiver.parts):
            if function.node.name == "__init__":
                return receiver
            return Value(self._package.result_class(function), receiver.carries)
        if function.takes_receiver(is_of_class=isinstance(receiver.definition, Class)):
            arguments = [receiver, *arguments]
        bound = self._bound(function.node.args, arguments, keywords)
        return self._follower.enter(function, bound)

    def _bound(
        self, parameters: ast.arguments, arguments: list[Value], keywords: dict[str, Value]
    ) -> dict[str, Value]:
        """Return the value of each parameter that the call fills."""
        positional = [*parameters.posonlyargs, *parameters.args]
        bound: dict[str, Value] = {}
        for parameter, value in zip(positional, arguments, strict=False):
            bound[parameter.arg] = value
        if parameters.vararg is not None:
            bound[parameters.vararg.arg] = joined(arguments[len(positional) :])
        names = [each.arg for each in (*positional, *parameters.kwonlyargs)]
        others: list[Value] = []
        for name, value in keywords.items():
            if name in names:
                bound[name] = value
            else:
                others.append(value)
        if parameters.kwarg is not None:
            bound[parameters.kwarg.arg] = joined(others)
        return bound


def called_name(node: ast.Call) -> str:
    """Return the last name of the callee; "" if it has none."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def follow(package: Package, parameter: str) -> Route:
    """Return the route of ``parameter``, a "function:parameter" or "Class.method:parameter".

    Raises LookupError if the package has no such function, or several.
    """
    name, _, argument = parameter.partition(":")
    follower = _Follower(package)
    follower.enter(package.find(name, argument), {argument: Value(carries=True)})
    return Route(tuple(follower.entries))


@cache
def followed() -> dict[str, Route]:
    """Return the route of each of `PARAMETERS` in pyctl."""
    package = Package(PACKAGE)
    return {each: follow(package, each) for each in PARAMETERS}


def table(routes: dict[str, Route]) -> list[str]:
    """Return a line for each route."""
    lines = [f"{'parameter':30}  stays  files  returns  visits of one file"]
    for name, route in routes.items():
        file, n_visits = route.most_visited
        counts = f"{len(route.stays):6} {len(route.visits):6} {route.n_returns:8}"
        lines.append(f"{name:30} {counts}  {n_visits} ({file})")
    return lines


def described(name: str, route: Route) -> list[str]:
    """Return a line for each stay, with the functions entered there."""
    lines = [f"{name}: {len(route.stays)} stays"]
    for number, (file, entries) in enumerate(route.stays, 1):
        functions = dict.fromkeys(each.function for each in entries)
        lines.append(f"{number:4}  {file:32} {', '.join(functions)}")
    return lines


def main(arguments: list[str]) -> None:
    package = Package(PACKAGE)
    routes = {each: follow(package, each) for each in arguments or PARAMETERS}
    for name, route in routes.items():
        print("\n".join(described(name, route)), end="\n\n")
    print("\n".join(table(routes)))


if __name__ == "__main__":
    main(sys.argv[1:])
