"""Compare another release of llama.cpp with the declarations that the extension relies on.

python -m tools.pin llama_cpp_python-0.3.35.tar.gz
python -m tools.pin path/to/llama.cpp --test

Compares the headers that `csrc/compat.h` includes with those of the pinned release: each class and function of them
that the sources of the extension name, and the classes of memories. With --test, the tests of exactness follow, against
the library that is installed.
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pyctl.setup.source import unpack_source

__all__ = ["Changes", "changes", "declarations", "memory_classes"]

ROOT = Path(__file__).resolve().parents[1]
PINNED = ROOT / "vendor" / "llama.cpp"
CSRC = ROOT / "csrc"
PLACES = ("include", "src", "ggml/include", "ggml/src")
TESTS = ("tests/model/native", "tests/model/llama")

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r'^#include "([\w-]+\.h)"', re.MULTILINE)
_NAME = re.compile(r"\b(?:llama|ggml|llm)_\w+")
_BLOCK = re.compile(r"\b(?:class|struct|enum)\s+(?:class\s+)?(\w+)\b[^;{}()=]*\{")
_FUNCTION = re.compile(r"^[ \t]*[\w:]+[\w\s:*&<>,]*?[\s*&](\w+)\s*\(", re.MULTILINE)
_MEMORY = re.compile(r"\bclass\s+(\w+)\s*:\s*public\s+llama_memory_i\b")


@dataclass(frozen=True)
class Changes:
    """Of the names that the extension uses: those that are ``gone``, the ``changed`` with their differences, and how
    many are ``same``; memory classes that are ``new_memories`` and ``gone_memories``, and headers that are missing.
    """

    gone: tuple[str, ...]
    changed: Mapping[str, str]
    same: int
    new_memories: tuple[str, ...]
    gone_memories: tuple[str, ...]
    missing_headers: tuple[str, ...]

    @property
    def is_none(self) -> bool:
        """Whether nothing has to be looked at."""
        return not (self.gone or self.changed or self.new_memories or self.gone_memories or self.missing_headers)


def declarations(header: str) -> dict[str, str]:
    """The text of each class, structure, enumeration and function that ``header`` declares, without comments."""
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
    """Where the block ends whose brace stands there."""
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
    """The classes of memories of the source tree at ``tree``."""
    return {name for path in (tree / "src").glob("*.h") for name in _MEMORY.findall(path.read_text("utf-8", "replace"))}


def changes(old: Path, new: Path, csrc: Path = CSRC) -> Changes:
    """What the source tree ``new`` changes of ``old`` for the extension at ``csrc``."""
    headers = _INCLUDE.findall((csrc / "compat.h").read_text(encoding="utf-8"))
    sources = [path for pattern in ("*.h", "*.cpp") for path in csrc.rglob(pattern)]
    used = {name for path in sources for name in _NAME.findall(path.read_text(encoding="utf-8"))}
    before, after = (_declared(tree, headers) for tree in (old, new))
    relevant = sorted(used & before.keys())
    gone = tuple(name for name in relevant if name not in after)
    kept = [name for name in relevant if name in after]
    changed = {name: _difference(before[name], after[name]) for name in kept if before[name] != after[name]}
    memories = memory_classes(old), memory_classes(new)
    return Changes(
        gone,
        changed,
        len(kept) - len(changed),
        tuple(sorted(memories[1] - memories[0])),
        tuple(sorted(memories[0] - memories[1])),
        tuple(name for name in headers if _header(new, name) is None and _header(old, name) is not None),
    )


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
    """The lines to print."""
    for name in found.missing_headers:
        yield f"header is gone: {name}"
    for name in found.gone:
        yield f"gone: {name}"
    for name, difference in found.changed.items():
        yield f"changed: {name}"
        yield from (f"    {line}" for line in difference.splitlines())
    for name in found.new_memories:
        yield f"new memory class: {name}"
    for name in found.gone_memories:
        yield f"memory class is gone: {name}"
    n_changed = len(found.changed) + len(found.gone)
    yield f"{found.same + n_changed} declarations in use: {found.same} same, {n_changed} changed or gone"


def source_tree(given: Path, work: Path) -> Path:
    """The source tree of llama.cpp at ``given``, or in that archive of llama-cpp-python, unpacked into ``work``."""
    if given.is_file():
        unpack_source(given, work, lambda path: path.endswith(".h"))
        given = work
    if not (given / "include" / "llama.h").is_file():
        raise SystemExit(f"{given} is no source tree of llama.cpp, nor a source distribution of llama-cpp-python")
    return given


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", type=Path, help="source tree of llama.cpp, or archive of llama-cpp-python's source")
    parser.add_argument("--test", action="store_true", help="run the tests of exactness as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = changes(PINNED, source_tree(arguments.release, Path(work)))
    print("\n".join(report(found)))
    if arguments.test:
        return subprocess.run([sys.executable, "-m", "pytest", "-q", *TESTS], cwd=ROOT, check=False).returncode
    return 0 if found.is_none else 1


if __name__ == "__main__":
    sys.exit(main())
