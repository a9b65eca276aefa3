"""Measures of one Python source: how dense it is, and which of its parts lack an explanation.

A line of code is neither blank nor a comment nor part of a docstring. All nodes of the
syntax tree count, but for docstrings, operators, and the load or store of a name.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import astuple, dataclass

__all__ = ["MAX_WIDTH", "Reading", "read"]

MAX_WIDTH = 100
"""Columns of a line."""

MAX_UNDOCUMENTED = 17
"""Lines of a function, from `def` to its end, that need no docstring."""

UNCOUNTED = (ast.boolop, ast.cmpop, ast.expr_context, ast.operator, ast.unaryop)
"""Nodes that repeat what another node shows."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (*FUNCTIONS, ast.ClassDef, ast.Module)

FRAGMENT = re.compile(
    r"(?:That|Those|None|One|No|Not"  # a phrase without its noun
    r"|To|Of|From|As|In|On|By|With|Up to"  # a phrase without its verb
    r"|Where|What|How|Whether|If|So)\b"  # a clause without its main clause
)
"""The start of a docstring that is no sentence, and names no thing either."""

LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
"""Tokens that make no line a line of code."""


@dataclass(frozen=True)
class Reading:
    """Counts of one source, or sums of several."""

    code: int = 0
    nodes: int = 0
    tuples: int = 0
    """Assignments of a tuple of values to a tuple of names."""
    fragments: int = 0
    undocumented: int = 0
    """Functions of over `MAX_UNDOCUMENTED` lines without a docstring."""
    wide: int = 0
    """Lines of over `MAX_WIDTH` columns."""

    def __add__(self, other: Reading) -> Reading:
        return Reading(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def nodes_per_100(self) -> float:
        """Syntax nodes per 100 lines of code."""
        return 100 * self.nodes / max(self.code, 1)

    @property
    def tuples_per_1000(self) -> float:
        """Assignments of tuples per 1,000 lines of code."""
        return 1000 * self.tuples / max(self.code, 1)


def read(source: str) -> Reading:
    """Return the counts of a source. Raises SyntaxError if it is none."""
    nodes = list(ast.walk(ast.parse(source)))
    texts = [node for node in nodes if is_text(node)]
    n_counted = sum(not isinstance(node, UNCOUNTED) for node in nodes)
    return Reading(
        code=len(token_lines(source) - text_lines(texts)),
        nodes=n_counted - 2 * len(texts),  # a text is a statement and a constant
        tuples=sum(map(is_tuple_assignment, nodes)),
        fragments=sum(map(starts_as_fragment, nodes)),
        undocumented=sum(map(lacks_docstring, nodes)),
        wide=sum(len(line) > MAX_WIDTH for line in source.split("\n")),
    )


def is_text(node: ast.AST) -> bool:
    """Return whether the node is a docstring, of a function or below a constant."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def text_lines(texts: Iterable[ast.AST]) -> set[int]:
    """Return the numbers of the lines of some statements."""
    lines: set[int] = set()
    for node in texts:
        lines |= set(range(node.lineno, node.end_lineno + 1))  # type: ignore[attr-defined]
    return lines


def token_lines(source: str) -> set[int]:
    """Return the numbers of the lines that hold more than layout and comments."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines


def is_tuple_assignment(node: ast.AST) -> bool:
    """Return whether the node assigns several values to several names in one statement."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def starts_as_fragment(node: ast.AST) -> bool:
    """Return whether the node has a docstring that starts as a fragment."""
    text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
    return text is not None and FRAGMENT.match(text.lstrip()) is not None


def lacks_docstring(node: ast.AST) -> bool:
    """Return whether the node is a long function without a docstring."""
    if not isinstance(node, FUNCTIONS) or node.end_lineno is None:
        return False
    n_lines = node.end_lineno - node.lineno + 1
    return n_lines > MAX_UNDOCUMENTED and ast.get_docstring(node) is None
