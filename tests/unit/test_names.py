"""Rules that a reader relies on: one name for one class, and a docstring on every public name."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


WORDS = {
    r"(?i)\b(whoever|nobody|somebody)\b": 0,  # quoted
    r"\b(hangs? on|mends?|errands|any more)\b": 0,  # quoted
    r"\bthe (most|least) is\b": 0,  # quoted
    r", too(?=[.,;:)]|$)": 0,  # quoted
    r'\Ar?"""(That of|Those|The same|With |Without |So many)': 0,
    r"\bwhat (is|was|leaves|goes|comes|has|cannot)\b": 22,
    r"\b(promises?|wants?|tells?|knows?|says?|sees|asks?)\b": 28,
    r"\b(behind|beside)\b": 15,
    r"\b(begins?|began|begun)\b": 30,
    r"\b(leaves?|left|goes|comes?|came) (first|last|away|back|along|for|it|there)\b": 46,
    r"\b[Ww]here (no|nothing|there|it|they|that)\b": 57,
    r"\balone(?=[.,;:)])": 13,
    r"\b(of its own|that of|those of|of their own)\b": 13,
}
"""Foreign patterns, and how many places have them: the numbers may only fall. A line of data ends
in ``# quoted``.
"""
TEXTS = ("README.md", "pyctl/", "csrc/", "bench/", "tools/", "docs/", "tests/")
UNCLEAN = ("tests/", "bench/results/", "bench/recorded/", "docs/")
"""Only the first of `WORDS` counts here."""
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
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES):
        name = path.relative_to(root).as_posix()
        if name.startswith(TEXTS):
            for sentence in (" ".join(each.split()) for each in sentences(path)):
                for words in [*WORDS][: 1 if name.startswith(UNCLEAN) else None]:
                    found[words] += [
                        f"{name}: {sentence[:200]}" for _ in re.finditer(words, sentence)
                    ]
    assert {words: places for words, places in found.items() if len(places) > WORDS[words]} == {}
