"""Measures of the house: lines, words, imports. tests/unit/test_house.py holds the ceilings.

python -m tools.house
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

__all__ = ["measure", "module_graph", "modules", "tree_of"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pyctl"
PORTS = ("Evaluator", "SequenceMemory", "Lifecycle", "Vocabulary", "Control")


def modules() -> dict[str, Path]:
    """All modules of the package by their full names."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["pyctl", *path.relative_to(PACKAGE).with_suffix("").parts]
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@cache
def tree_of(path: Path) -> ast.Module:
    """The file parsed."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def module_graph() -> dict[str, set[str]]:
    """What each module imports, at its top or inside functions; the package's own modules by their
    full names.
    """
    known = modules()
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        found: set[str] = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} imports relatively"
                base = node.module or ""
                found |= {
                    f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
                    for alias in node.names
                }
        graph[name] = found - {name}
    return graph


def n_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def longest_chain(graph: dict[str, set[str]]) -> int:
    """Modules in the longest chain of imports."""

    @cache
    def depth(name: str) -> int:
        return 1 + max((depth(target) for target in graph[name] & graph.keys()), default=0)

    return max(map(depth, graph))


def packages() -> dict[str, list[Path]]:
    """The files of each directory of the package; "" has the package's own."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in modules().values():
        found[path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else ""].append(path)
    return dict(found)


def n_arrows(graph: dict[str, set[str]], package: str, of: str) -> int:
    """Imports of modules of ``package`` by modules of another one; each pair of modules is one."""
    inside = f"pyctl.{package}"
    importers = (
        targets for name, targets in graph.items() if f"{name}.".startswith(f"pyctl.{of}.")
    )
    return sum(f"{target}.".startswith(f"{inside}.") for targets in importers for target in targets)


def n_fields(name: str) -> int:
    """Annotated fields of the class. Raises KeyError if there is none."""
    for path in modules().values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return sum(isinstance(item, ast.AnnAssign) for item in node.body)
    raise KeyError(name)


def n_port_methods() -> int:
    found = 0
    for path in modules().values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and node.name in PORTS:
                found += sum(isinstance(item, ast.FunctionDef) for item in node.body)
    return found


def n_callables(*packages: str) -> int:
    """Parameters and fields that are functions, by their annotations."""
    found = 0
    for name, path in modules().items():
        if not name.startswith(tuple(f"pyctl.{package}" for package in packages)):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
                found += "Callable[" in ast.unparse(node.annotation)
    return found


def n_glossary() -> int:
    """Rows of the first table of the glossary."""
    text = (ROOT / "docs/internals/glossary.md").read_text(encoding="utf-8")
    rows = re.search(r"\| word \| meaning \|\n\|[-|]+\|\n((?:\|.*\n)+)", text)
    return rows[1].count("\n") if rows is not None else 0


def is_private(node: ast.AST) -> bool:
    """Whether ``node`` reads or sets a private member of another object; ctypes has one in its
    interface.
    """
    if not isinstance(node, ast.Attribute) or (
        isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    ):
        return False
    return (
        node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in ("_core", "_fields_")
    )


def measure() -> dict[str, int]:
    """Every figure by its name."""
    graph = module_graph()
    csrc = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    of_tests = [node for path in (ROOT / "tests").rglob("*.py") for node in ast.walk(tree_of(path))]
    return {
        "lines": n_lines(modules().values()),
        **{f"lines of pyctl/{name}": n_lines(paths) for name, paths in packages().items()},
        "lines of csrc": n_lines(csrc),
        **{
            f"lines of {name}": n_lines((ROOT / name).rglob("*.py"))
            for name in ("tests", "bench", "tools")
        },
        "words of docs": sum(
            len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs").rglob("*.md")
        ),
        "private members in tests": sum(map(is_private, of_tests)),
        "monkeypatches in tests": sum(
            isinstance(node, ast.Attribute) and node.attr == "setattr" for node in of_tests
        ),
        "methods of the ports": n_port_methods(),
        "imports of cache by engine": n_arrows(graph, "cache", "engine"),
        "callables handed on in cache and engine": n_callables("cache", "engine"),
        "fields of LiveSequence": n_fields("LiveSequence"),
        "fields of Prompt": n_fields("Prompt"),
        "longest chain of imports": longest_chain(graph),
        "words of the glossary": n_glossary(),
    }


def main() -> None:
    for name, number in measure().items():
        print(f"{number:7,}  {name}")


if __name__ == "__main__":
    main()
