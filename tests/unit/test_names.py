"""Rules that a reader relies on: one name for one class, and a docstring on every public name."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.house import modules, tree_of

PACKAGE = Path(__file__).resolve().parents[2] / "pyctl"


def test_every_class_has_a_name_of_its_own() -> None:
    nodes = (node for path in modules().values() for node in tree_of(path).body)
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, n in classes.items() if n > 1 and not name.startswith("_")] == []


def public_members(module: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (owner, object, name) of each public function, class and method that ``module``
    defines.
    """
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value) or inspect.isclass(value):
            yield "", value, name
        if inspect.isclass(value):
            for member, function in vars(value).items():
                function = function.fget if isinstance(function, property) else function
                # What overrides a method of a library is documented there.
                public = not member.startswith("_") and not any(
                    hasattr(base, member)
                    for base in value.__bases__
                    if not base.__module__.startswith("pyctl")
                )
                if public and inspect.isfunction(
                    inspect.unwrap(getattr(function, "__func__", function))
                ):
                    yield name, getattr(value, member), member


def promised() -> set[str]:
    """Return names of methods that a protocol of the package explains; implementations need not
    repeat it.
    """
    found = set()
    for path in modules().values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and any(
                "Protocol" in ast.unparse(base) for base in node.bases
            ):
                found |= {
                    item.name
                    for item in node.body
                    if isinstance(item, ast.FunctionDef) and ast.get_docstring(item)
                }
    return found


def test_public_names_are_documented() -> None:
    explained = promised()
    bare = []
    for name in modules():
        if name.endswith("__main__"):
            continue
        module = importlib.import_module(name)
        if not module.__doc__:
            bare.append(name)
        for owner, value, member in public_members(module):
            # A dataclass without a docstring gets its signature for one.
            documented = inspect.getdoc(value) and not (value.__doc__ or "").startswith(
                f"{member}("
            )
            if not documented and member not in explained:
                bare.append(f"{name}.{owner}.{member}".replace("..", "."))
    assert not bare


NEVER = (
    # words of another century or language
    r"(?i)\b(whoever|nobody|somebody|errands)\b",
    r"\b(hangs? on|mends?|any more)\b",
    r"\bthe (most|least) is\b",
    r", too(?=[.,;:)]|$)",
    # a docstring whose head noun is missing
    r'\Ar?"""(That (of|at|which)|Those|The same|With |Without |So many|Of |Up to |How |Where )',
    # `what` instead of a noun; a sentence that ends in a question mark is a question
    r"\bWhat\b(?![^.]*\?)",
    r"\b(what (was|has|will|goes|comes|leaves|enters|cannot|fails|follows|differs|stays|starts"
    r"|waits|drafts|binds|counts|closes|belongs|helps|serves|slows|runs|happens|exists|changes"
    r"|remains)|Of what)\b",
    # verbs of people for parts of a program
    r"\b(promises?|wants?|knows?|tells|sees)\b",
    r"\b(header|option|flag|request|file|server|line|log)s? says?\b",
)
"""Patterns that no comment, docstring or message has. A text of data ends in ``# quoted``."""
TEXTS = ("README.md", "pyctl/", "csrc/", "bench/", "tools/", "docs/", "tests/")
QUOTING = ("tests/", "bench/results/", "bench/recorded/")
"""Places of recorded texts, and of tests with texts of clients."""
SUFFIXES = (".py", ".pyi", ".js", ".c", ".cpp", ".h", ".cu", ".md")


def sentences(path: Path) -> Iterator[str]:
    """Yield comments, docstrings and messages of the file."""
    text = "".join(
        line for line in path.read_text("utf-8").splitlines(True) if not line.endswith("# quoted\n")
    )
    if path.suffix == ".md":
        yield from text.split("\n\n")
    elif path.suffix not in (".py", ".pyi"):
        yield from (
            re.sub(r"\s*//", "", each)
            for each in re.findall(r'//.*(?:\n *//.*)*|"[^"\n]* [^"\n]*"', text)
        )
    else:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT or (
                token.type == tokenize.STRING and " " in token.string
            ):
                yield token.string


def test_sentences_are_plain_english() -> None:
    root = PACKAGE.parent
    found = []
    for path in sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES):
        name = path.relative_to(root).as_posix()
        if not name.startswith(TEXTS) or name.startswith(QUOTING):
            continue
        for sentence in (" ".join(each.split()) for each in sentences(path)):
            found += [
                f"{name}: {match[0]!r} in {sentence[:200]}"
                for pattern in NEVER
                for match in re.finditer(pattern, sentence)
            ]
    assert found == []


@pytest.mark.parametrize(
    "sentence",
    [
        "Whoever reads",
        'r"""Of the rows',
        "Return what was left",
        "the cache knows",
        "the header says",
        "It works, too.",
        "What fails is skipped.",
        "guards what follows",
    ],
)
def test_a_pattern_is_found(sentence: str) -> None:
    assert any(re.search(pattern, sentence) for pattern in NEVER)
