"""Docstrings name what a signature does not show: errors, shapes, units, the source of a format."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.unit.test_names import promised
from tools.house import ROOT, tree_of

CEILINGS = {"errors": 0, "shapes": 0, "units": 0, "formats": 0}
"""Functions, or modules that read a format, that miss a rule today. A number may only fall."""

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
CONSTRUCTORS = ("__init__", "__post_init__")
SHAPE = re.compile(
    r"\([^()\s]+,\)|\([^()]+, [^()]+\)|\b(u?int|float)(8|16|32|64)\b|\b(shape|as `\w+\.\w+`)", re.I
)
UNIT = re.compile(
    r"\b(seconds?|ms|milliseconds|[MG]iB|bytes|tokens|plain "
    r"steps|prompts|scales|values|numbers|integers|probability"
    r"|shares?|fractions?|clock|Gbit/s|[a-z]+-probabilities|as `\w+\.\w+`)(?!\w)",
    re.IGNORECASE,
)
WITH_UNIT = re.compile(
    r"seconds|(^|_)(ms|[mg]ibs?)$|bytes|share|ratio|rate$|probab|^p_|temperature|scale"
)
FORMAT = re.compile(
    r"\.unpack(_from)?\(|from_bytes\(|b\"GGUF\"|b\"data: |\"\"\"Parser of|server-sent"
)
SOURCE = re.compile(
    r"RFC \d+|[Ss]pecification|WHATWG|docs/\w+|(src|include)/[\w-]+\.\w+"
    r"|Struct\(.*\n(MAGIC.*\n)?\"\"\""
)


def in_scope(
    node: ast.AST, caught: frozenset[str] = frozenset()
) -> Iterator[tuple[ast.AST, frozenset[str]]]:
    """Yield the nodes of a function, its inner functions aside, with the names of the errors that
    it catches itself.
    """
    for name, value in ast.iter_fields(node):
        inside = caught
        if isinstance(node, ast.Try) and name == "body":
            types = [handler.type for handler in node.handlers if handler.type is not None]
            inside |= {
                ast.unparse(each) for kind in types for each in getattr(kind, "elts", [kind])
            }
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(
                child, (*Function, ast.ClassDef, ast.Lambda)
            ):
                yield child, inside
                yield from in_scope(child, inside)


def raised(node: ast.AST) -> set[str]:
    """Return the classes of the errors that a function raises itself."""
    found = set()
    for child, caught in in_scope(node):
        if isinstance(child, ast.Raise) and child.exc is not None:
            name = ast.unparse(getattr(child.exc, "func", child.exc)).split(".")[-1]
            found |= {name} - caught if name[0].isupper() else set()
    return found - {"AssertionError", "NotImplementedError"}


def misses(tree: ast.Module, explained: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (rule, name) of each public function that misses a rule, and of each alias of an array.

    A method may rely on the docstring of its class or of a protocol, Tokens and Block on that of
    the alias.
    """
    for node, after in pairwise(tree.body):
        is_array = isinstance(node, ast.AnnAssign) and re.match(
            r"\w+: TypeAlias = NDArray", ast.unparse(node)
        )
        if is_array and not (isinstance(after, ast.Expr) and SHAPE.search(ast.unparse(after))):
            yield "shapes", ast.unparse(node)
    for owner in (
        tree,
        *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"),
    ):
        of_class = ast.get_docstring(owner) or "" if isinstance(owner, ast.ClassDef) else ""
        for node in owner.body:
            if not isinstance(node, Function) or (
                node.name[0] == "_" and node.name not in CONSTRUCTORS
            ):
                continue
            own = ast.get_docstring(node)
            if own is None and node.name in explained:
                continue
            text = own or of_class
            every = [
                arg
                for arg in ast.walk(node.args)
                if isinstance(arg, ast.arg) and arg.annotation is not None
            ]
            types = {
                arg.arg: ast.unparse(arg.annotation) for arg in every if arg.annotation is not None
            }
            arrays = [
                *types.values(),
                ast.unparse(node.returns) if node.returns is not None else "",
            ]
            floats = [name for name, kind in types.items() if re.search(r"\bfloat\b", kind)]
            if node.name != "main" and any(name not in text for name in raised(node)):
                yield "errors", node.name
            if any(re.search("NDArray|ndarray", kind) for kind in arrays) and not SHAPE.search(
                text
            ):
                yield "shapes", node.name
            if not all(WITH_UNIT.search(name) for name in floats) and not UNIT.search(text):
                yield "units", node.name


def test_docstrings_name_errors_shapes_units_and_sources() -> None:
    found: dict[str, list[str]] = {rule: [] for rule in CEILINGS}
    explained = promised()
    for path in sorted(
        path for folder in ("pyctl", "bench", "tools") for path in (ROOT / folder).rglob("*.py")
    ):
        name = path.relative_to(ROOT).as_posix()
        source = path.read_text(encoding="utf-8")
        for rule, function in misses(tree_of(path), explained):
            found[rule].append(f"{name} {function}")
        if name.startswith("pyctl/") and FORMAT.search(source) and not SOURCE.search(source):
            found["formats"].append(name)
    assert {rule: each for rule, each in found.items() if len(each) > CEILINGS[rule]} == {}


@pytest.mark.parametrize(
    ("rule", "line", "docstring"),
    [
        ("errors", "def load(path): raise ModelError(path)", "Raises ModelError."),
        ("errors", "async def load(path):\n    raise errors.ModelError", "Raises ModelError."),
        ("shapes", "def rows(n: int) -> NDArray[np.float32]: ...", "Shape (n, width)."),
        ("units", "def close(self, timeout: float) -> None: ...", "Wait for ``timeout`` seconds."),
    ],
)
def test_a_silent_docstring_is_found(rule: str, line: str, docstring: str) -> None:
    (function,) = ast.parse(line).body
    assert isinstance(function, Function)
    for text, expected in (("Do it.", [(rule, function.name)]), (docstring, [])):
        documented = ast.parse(line)
        documented.body[0].body.insert(0, ast.Expr(ast.Constant(text)))  # type: ignore[attr-defined]
        assert list(misses(documented, set())) == expected
