"""Rules that a reader relies on: one name for one class, and a docstring on every public name."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.house import modules, tree_of

PACKAGE = Path(__file__).resolve().parents[2] / "pyctl"


def trees() -> Iterator[tuple[Path, ast.Module]]:
    """Every file of the package with its tree."""
    for path in modules().values():
        yield path, tree_of(path)


def repeated(pairs: Iterator[tuple[str, Path]]) -> dict[str, list[str]]:
    """The names that stand in more than one file, with these files."""
    found = defaultdict(list)
    for name, path in pairs:
        found[name].append(str(path.relative_to(PACKAGE)))
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_every_class_has_a_name_of_its_own() -> None:
    def classes() -> Iterator[tuple[str, Path]]:
        for path, tree in trees():
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    yield node.name, path

    assert not repeated(classes())


def test_a_slot_is_a_place_for_a_snapshot() -> None:
    """llama-server calls its sequences slots; inside, only the names of its flags say so."""
    of_llama_server = {"show_slots", "slot_save_path", "slots_debug"}
    found = set()
    for path, tree in trees():
        if "cache" not in path.relative_to(PACKAGE).parts:
            names = {getattr(node, "id", getattr(node, "attr", getattr(node, "name", ""))) for node in ast.walk(tree)}
            found |= {name for name in names if name and "slot" in name.lower()}
    assert found - of_llama_server == {"n_slots"}


def public_members(module: Any) -> Iterator[tuple[str, Any, str]]:
    """(owner, object, name) of each public function, class and method that ``module`` defines."""
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
                    hasattr(base, member) for base in value.__bases__ if not base.__module__.startswith("pyctl")
                )
                if public and inspect.isfunction(inspect.unwrap(getattr(function, "__func__", function))):
                    yield name, getattr(value, member), member


def promised() -> set[str]:
    """Names of methods that a protocol of the package explains; implementations need not repeat it."""
    found = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
                found |= {
                    item.name for item in node.body if isinstance(item, ast.FunctionDef) and ast.get_docstring(item)
                }
    return found


def test_public_names_are_documented() -> None:
    explained, bare = promised(), []
    for name in modules():
        if name.endswith("__main__"):
            continue
        module = importlib.import_module(name)
        if not module.__doc__:
            bare.append(name)
        for owner, value, member in public_members(module):
            # A dataclass without a docstring gets its signature for one.
            documented = inspect.getdoc(value) and not (value.__doc__ or "").startswith(f"{member}(")
            if not documented and member not in explained:
                bare.append(f"{name}.{owner}.{member}".replace("..", "."))
    assert not bare


UNNAMED = re.compile(r"\b(whoever|nobody|somebody)\b", re.IGNORECASE)  # quoted
FOLDERS = ("pyctl", "csrc", "bench", "tools", "tests")
SUFFIXES = (".py", ".pyi", ".js", ".c", ".cpp", ".h", ".cu", ".md")


def test_sentences_name_their_subjects() -> None:
    """Code, comments and results name the part they are about. A line of data ends in ``# quoted``."""
    root = PACKAGE.parent
    paths = [path for folder in FOLDERS for path in (root / folder).rglob("*.*") if path.suffix in SUFFIXES]
    found = [
        f"{name}: {line.strip()}"
        for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths)
        for line in path.read_text(encoding="utf-8").splitlines()
        if UNNAMED.search(line) and not line.endswith("# quoted")
    ]
    assert found == []
