"""Compare another release of llama.cpp with the declarations that the extension relies on.

python -m tools.pin 0.3.35
python -m tools.pin llama_cpp_python-0.3.35.tar.gz
python -m tools.pin path/to/llama.cpp

Compares the headers of llama.cpp that csrc includes with the pinned release's: each class and
function of them that the sources name, and the classes of memories. `pyctl setup --llama-cpp` then
compiles and tests that release.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pyctl.setup.source import open_release, pip_command

__all__ = ["Changes", "changes", "declarations", "memory_classes"]

ROOT = Path(__file__).resolve().parents[1]
PINNED = ROOT / "vendor" / "llama.cpp"
CSRC = ROOT / "csrc"
PLACES = ("include", "src", "ggml/include", "ggml/src")

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r'^#include "([\w-]+\.h)"', re.MULTILINE)
_NAME = re.compile(r"\b(?:llama|ggml|llm)_\w+")
_BLOCK = re.compile(r"\b(?:class|struct|enum)\s+(?:class\s+)?(\w+)\b[^;{}()=]*\{")
_FUNCTION = re.compile(r"^[ \t]*[\w:]+[\w\s:*&<>,]*?[\s*&](\w+)\s*\(", re.MULTILINE)
_DERIVED = re.compile(r"\bclass\s+(\w+)\s*:\s*public\s+(\w+)")


@dataclass(frozen=True)
class Changes:
    """Changes of the names that the extension uses: those that are ``gone``, the ``changed`` with
    their differences, and the number of the ``same``; and classes of memories that are new.
    """

    gone: tuple[str, ...]
    changed: Mapping[str, str]
    same: int
    new_memories: tuple[str, ...]

    @property
    def is_none(self) -> bool:
        """True if no change needs a review."""
        return not (self.gone or self.changed or self.new_memories)


def declarations(header: str) -> dict[str, str]:
    """Return the text of each class, structure, enumeration and function that ``header`` declares,
    without comments.
    """
    text = _COMMENT.sub("", header)
    found: dict[str, str] = {}
    for match in _BLOCK.finditer(text):
        end = _closing(text, match.end() - 1)
        found.setdefault(match[1], _tidy(text[match.start() : end]))
    for match in _FUNCTION.finditer(text):
        end = text.find(";", match.end())
        body = text.find("{", match.end())
        end = min(at for at in (end, body, len(text)) if at >= 0)
        found.setdefault(match[1], _tidy(text[match.start() : end]))
    return found


def _closing(text: str, at: int) -> int:
    """Return the end of the block whose opening brace is at ``at``; the end of ``text`` if it is
    open.
    """
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, at):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.end()
    return len(text)


def _tidy(text: str) -> str:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def memory_classes(tree: Path) -> set[str]:
    """Return the classes of memories of the source tree at ``tree``, those that derive from others
    included.
    """
    headers = [path.read_text("utf-8", "replace") for path in (tree / "src").glob("*.h")]
    bases = {name: base for header in headers for name, base in _DERIVED.findall(header)}
    found: set[str] = set()
    while (
        fresh := {name for name, base in bases.items() if base in {"llama_memory_i", *found}}
        - found
    ):
        found |= fresh
    return found


def changes(old: Path, new: Path, csrc: Path = CSRC) -> Changes:
    """Return the differences of the source tree ``new`` to ``old`` that concern the extension at
    ``csrc``.
    """
    sources = [
        path.read_text("utf-8") for pattern in ("*.h", "*.cpp") for path in csrc.rglob(pattern)
    ]
    headers = sorted({name for text in sources for name in _INCLUDE.findall(text)})
    used = {name for text in sources for name in _NAME.findall(text)}
    before, after = (_declared(tree, headers) for tree in (old, new))
    relevant = sorted(used & before.keys())
    gone = tuple(name for name in relevant if name not in after)
    kept = [name for name in relevant if name in after]
    changed = {
        name: _difference(before[name], after[name]) for name in kept if before[name] != after[name]
    }
    new_memories = tuple(sorted(memory_classes(new) - memory_classes(old)))
    return Changes(gone, changed, len(kept) - len(changed), new_memories)


def _header(tree: Path, name: str) -> Path | None:
    return next((path for place in PLACES if (path := tree / place / name).is_file()), None)


def _declared(tree: Path, headers: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in filter(None, (_header(tree, name) for name in headers)):
        for name, text in declarations(path.read_text("utf-8", "replace")).items():
            found.setdefault(name, text)
    return found


def _difference(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def report(found: Changes) -> Iterator[str]:
    """Yield the lines to print."""
    for name in found.gone:
        yield f"gone: {name}"
    for name, difference in found.changed.items():
        yield f"changed: {name}"
        yield from (f"    {line}" for line in difference.splitlines())
    for name in found.new_memories:
        yield f"new memory class: {name}"
    n_changed = len(found.changed) + len(found.gone)
    yield (
        f"{found.same + n_changed} declarations in use: {found.same} same, {n_changed} changed "
        "or gone"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "release", help="version of llama-cpp-python, its archive, or a source tree of llama.cpp"
    )
    wanted = parser.parse_args().release
    with tempfile.TemporaryDirectory() as work:
        found = changes(PINNED, open_release(pip_command(Path(work)), wanted, Path(work)).tree)
    print("\n".join(report(found)))
    return 0 if found.is_none else 1


if __name__ == "__main__":
    sys.exit(main())
