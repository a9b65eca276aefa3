"""Measures of the source: how it reads, its shape, its routes, its couplings, its lines.

python -m tools.house              all measures, and what changed since they were kept
python -m tools.house --routes     also the files that each of four parameters passes
python -m tools.house --keep       lower the kept numbers, in tools/house.json, to the measured ones
python -m tools.house --raise      set them to the measured ones; the commit gives the reason

tests/unit/test_house.py fails if a number is above the kept one by more than 2 %. Lines have no
limit: a limit on lines is met by packing them.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from tools import ratchet
from tools.ratchet import Numbers
from tools.reading import Reading, read
from tools.routes import described, followed, table
from tools.shape import Shape, above_rules, highest, shapes

__all__ = ["measure", "module_graph", "modules", "tree_of"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pyctl"
PORTS = ("Evaluator", "SequenceMemory", "DeviceCells", "Lifecycle", "Vocabulary", "Control")

MIN_TESTED = 60
"""Lines of a module that has to have a test file of its name."""

SOURCES = {".py", ".pyi", ".js", ".css"}
"""Suffixes of files whose lines count for a package."""

CODE = "lines of code, without blank lines, comments and docstrings"
NODES = "syntax nodes per 100 lines of code"
TUPLES = "assignments of tuples of values per 1,000 lines of code"
FRAGMENTS = "docstrings that start as a fragment"
UNDOCUMENTED = "functions of 18 lines and more without a docstring"
WIDE = "lines above 100 columns"
UNTESTED = "modules of 60 lines and more without a test file of their name"
READING = (NODES, TUPLES, FRAGMENTS, UNDOCUMENTED, WIDE, UNTESTED)
"""Measures of each place."""

PARAMETERS = "most parameters of a function"
PUBLIC = "most public members of a class"
SHAPE = "above a rule of shape"
STAYS = "stays of a parameter"
VISITS = "most visits of a parameter to one file"
COUPLINGS = "couplings"
MEANS = "percent of the lines of tests outside test functions"
"""Imports, fixtures and helpers: a reader of a test has to look them up."""

COLUMNS = {
    CODE: "code",
    NODES: "nodes",
    TUPLES: "tuples",
    FRAGMENTS: "fragments",
    UNDOCUMENTED: "undocumented",
    WIDE: "wide",
    UNTESTED: "untested",
    PARAMETERS: "parameters",
    PUBLIC: "public",
}
"""The columns of the table: measure, head."""


def modules() -> dict[str, Path]:
    """Return the files of all modules of the package by their full names."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["pyctl", *path.relative_to(PACKAGE).with_suffix("").parts]
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of the file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def module_graph() -> dict[str, set[str]]:
    """Return the imports of each module, at its top or inside functions: the package's own modules
    by their full names.
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
    """Return the number of modules in the longest chain of imports."""

    @cache
    def depth(name: str) -> int:
        return 1 + max((depth(target) for target in graph[name] & graph.keys()), default=0)

    return max(map(depth, graph))


def n_arrows(graph: dict[str, set[str]], package: str, of: str) -> int:
    """Return the number of imports of modules of ``package`` by modules of another one; each pair
    of modules counts once.
    """
    inside = f"pyctl.{package}"
    importers = (
        targets for name, targets in graph.items() if f"{name}.".startswith(f"pyctl.{of}.")
    )
    return sum(f"{target}.".startswith(f"{inside}.") for targets in importers for target in targets)


def n_fields(name: str) -> int:
    """Return the number of annotated fields of the class. Raises KeyError if there is none."""
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
    """Return the number of parameters and fields that are functions, by their annotations."""
    found = 0
    for name, path in modules().items():
        if not name.startswith(tuple(f"pyctl.{package}" for package in packages)):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
                found += "Callable[" in ast.unparse(node.annotation)
    return found


def n_glossary() -> int:
    """Return the number of rows of the first table of the glossary."""
    text = (ROOT / "docs/internals/glossary.md").read_text(encoding="utf-8")
    rows = re.search(r"\| word \| meaning \|\n\|[-|]+\|\n((?:\|.*\n)+)", text)
    return rows[1].count("\n") if rows is not None else 0


def is_private(node: ast.AST) -> bool:
    """Return whether ``node`` reads or sets a private member of another object; ctypes has one in
    its interface.
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


def has_facts_in_tuples(node: ast.AST) -> bool:
    """Return whether ``node`` asserts several facts at once, as a tuple that equals another one."""
    return (
        isinstance(node, ast.Assert)
        and isinstance(node.test, ast.Compare)
        and isinstance(node.test.left, ast.Tuple)
    )


def couplings() -> dict[str, float]:
    """Return the figures of how much the parts hold on to each other."""
    graph = module_graph()
    of_tests = [node for path in (ROOT / "tests").rglob("*.py") for node in ast.walk(tree_of(path))]
    pages = (ROOT / "docs").rglob("*.md")
    return {
        "words of docs": sum(len(path.read_text(encoding="utf-8").split()) for path in pages),
        "private members in tests": sum(map(is_private, of_tests)),
        "monkeypatches in tests": sum(
            isinstance(node, ast.Attribute) and node.attr == "setattr" for node in of_tests
        ),
        "assertions of several facts in tests": sum(map(has_facts_in_tuples, of_tests)),
        MEANS: share_of_means(sorted((ROOT / "tests").rglob("*.py"))),
        "methods of the ports": n_port_methods(),
        "imports of cache by engine": n_arrows(graph, "cache", "engine"),
        "callables handed on in cache and engine": n_callables("cache", "engine"),
        "fields of LiveSequence": n_fields("LiveSequence"),
        "fields of Prompt": n_fields("Prompt"),
        "longest chain of imports": longest_chain(graph),
        "words of the glossary": n_glossary(),
    }


def n_lines_of_tests(tree: ast.Module) -> int:
    """Return the lines of the test functions of a module and of its classes, with their decorators,
    which hold their tables.
    """
    number = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
            "test_"
        ):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            assert node.end_lineno is not None
            number += node.end_lineno - first + 1
    return number


def share_of_means(paths: Sequence[Path]) -> float:
    """Return the percentage of lines of these files that are outside test functions."""
    inside = sum(n_lines_of_tests(tree_of(path)) for path in paths)
    return round(100 * (1 - inside / n_lines(paths)), 1)


@cache
def places() -> dict[str, list[Path]]:
    """Return the Python files of pyctl, of each of its packages, of tests, bench and tools."""
    packages = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
    folders = [PACKAGE, *packages, *(ROOT / name for name in ("tests", "bench", "tools"))]
    return {folder.relative_to(ROOT).as_posix(): sorted(folder.rglob("*.py")) for folder in folders}


def lines() -> dict[str, int]:
    """Return the lines of each place, with the web page's and with stubs; no limit holds them."""
    found = {}
    for place, paths in places().items():
        inside = (ROOT / place).rglob("*") if place.startswith("pyctl") else paths
        found[place] = n_lines(path for path in inside if path.suffix in SOURCES)
    found["csrc"] = n_lines(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    return found


def untested(paths: Iterable[Path]) -> list[Path]:
    """Return the modules of `MIN_TESTED` lines and more without a test file of their name."""
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    return [
        path
        for path in paths
        if f"test_{path.stem}" not in tests
        and path.name != "__init__.py"
        and n_lines([path]) >= MIN_TESTED
    ]


@cache
def reading_of(path: Path) -> Reading:
    """Return the counts of a file."""
    return read(path.read_text(encoding="utf-8"))


@cache
def shapes_of(path: Path) -> list[Shape]:
    """Return the sizes of the functions and classes of a file."""
    return list(shapes(tree_of(path)))


def row_of(paths: Sequence[Path]) -> dict[str, float]:
    """Return the measures of reading of some files."""
    counts = sum(map(reading_of, paths), Reading())
    return {
        CODE: counts.code,
        NODES: round(counts.nodes_per_100, 1),
        TUPLES: round(counts.tuples_per_1000, 1),
        FRAGMENTS: counts.fragments,
        UNDOCUMENTED: counts.undocumented,
        WIDE: counts.wide,
        UNTESTED: len(untested(paths)),
        PARAMETERS: highest("parameters", map(shapes_of, paths)),
        PUBLIC: highest("public", map(shapes_of, paths)),
    }


@cache
def rows() -> dict[str, dict[str, float]]:
    """Return the row of each place in the table."""
    table_rows = {place: row_of(paths) for place, paths in places().items()}
    del table_rows["tests"][UNTESTED]  # tests have no tests
    return table_rows


@cache
def measure() -> Numbers:
    """Return all numbers that may hardly rise."""
    routes = followed()
    numbers: Numbers = {}
    for name in READING:
        numbers[name] = {place: row[name] for place, row in rows().items() if name in row}
    numbers[SHAPE] = dict(above_rules(map(shapes_of, modules().values())))
    numbers[STAYS] = {name: len(route.stays) for name, route in routes.items()}
    numbers[VISITS] = {name: route.most_visited[1] for name, route in routes.items()}
    numbers[COUPLINGS] = couplings()
    return numbers


def report(numbers: Numbers, *, has_routes: bool) -> Iterator[str]:
    """Yield the lines of the report."""
    yield from table_of_places()
    yield from section(SHAPE, numbers[SHAPE])
    yield from ("", *table(followed()))
    if has_routes:
        for name, route in followed().items():
            yield from ("", *described(name, route))
    yield from section(COUPLINGS, numbers[COUPLINGS])
    yield from section("lines, which no test limits", lines())
    yield from ("", "changed since the numbers were kept", *ratchet.changes(numbers))


def table_of_places() -> Iterator[str]:
    """Yield the heads, a row for each place, and a legend."""
    heads = [f"{head:>13}" for head in COLUMNS.values()]
    yield f"{'place':16}" + "".join(heads)
    for place, row in rows().items():
        cells = [f"{row.get(name, 0):13,g}" for name in COLUMNS]
        yield f"{place:16}" + "".join(cells)
    yield ""
    for name, head in COLUMNS.items():
        yield f"{head}: {name}"


def section(title: str, numbers: Mapping[str, float]) -> Iterator[str]:
    """Yield a title, and a line for each of the numbers by name."""
    yield from ("", title)
    for name, number in numbers.items():
        yield f"{number:9,g}  {name}"


def main(
    arguments: Sequence[str] | None = None,
    measured: Callable[[], Numbers] = measure,
    file: Path = ratchet.FILE,
) -> int:
    """Print the report, or keep the ``measured`` numbers in ``file``; return 1 if a number rose
    that was not to be kept.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__)
    parser.add_argument("--routes", action="store_true")
    keeping = parser.add_mutually_exclusive_group()
    keeping.add_argument("--keep", action="store_true")
    keeping.add_argument("--raise", action="store_true", dest="is_raised")
    options = parser.parse_args(arguments)
    numbers = measured()
    if options.is_raised:
        ratchet.keep(numbers, file)
        return 0
    if not options.keep:
        print(*report(numbers, has_routes=options.routes), sep="\n")
        return 0
    kept = ratchet.load(file)
    rises = ratchet.rises(kept, numbers)
    ratchet.keep(ratchet.lowered(kept, numbers), file)
    print(*rises, sep="\n")
    return 1 if rises else 0


if __name__ == "__main__":
    sys.exit(main())
