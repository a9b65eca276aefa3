"""Compare another release of llama.cpp with the declarations that the extension relies on.

python -m tools.pin llama_cpp_python-0.3.35.tar.gz
python -m tools.pin llama_cpp_python-0.3.35.tar.gz --test DIR
python -m tools.pin path/to/llama.cpp

Compares the headers that `csrc/compat.h` includes with those of the pinned release: each class and function of them
that the sources of the extension name, and the classes of memories. With --test, that release is compiled in a virtual
environment of its own in DIR, a copy of this tree beside it, pinned to that release; there the tests of exactness run.
What DIR has of an earlier run stays: a build of the library that was interrupted goes on, and a mended copy of csrc is
compiled without the library. Edit DIR/pyctl.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pyctl.module_command import module_command
from pyctl.setup.source import read_pin, unpack_source

__all__ = ["Changes", "changes", "declarations", "memory_classes", "pinned_copy"]

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
_DERIVED = re.compile(r"\bclass\s+(\w+)\s*:\s*public\s+(\w+)")


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
    """The classes of memories of the source tree at ``tree``, those that derive from others included."""
    headers = [path.read_text("utf-8", "replace") for path in (tree / "src").glob("*.h")]
    bases = {name: base for header in headers for name, base in _DERIVED.findall(header)}
    found: set[str] = set()
    while fresh := {name for name, base in bases.items() if base in {"llama_memory_i", *found}} - found:
        found |= fresh
    return found


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


# -- the tests against another release -------------------------------------------------------------------------------


def version_of(archive: Path) -> str:
    """The release in ``archive``; ValueError for another name than that of a source distribution."""
    found = re.fullmatch(r"llama_cpp_python-([\w.]+)\.tar\.gz", archive.name)
    if found is None:
        raise ValueError(f"{archive.name} is no source distribution: llama_cpp_python-VERSION.tar.gz")
    return found[1]


def pinned_copy(archive: Path, target: Path) -> None:
    """Copy the files of this tree that git knows to ``target``, pinned to the release in ``archive`` instead."""
    version, pin = version_of(archive), read_pin()
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for name in ("vendor/llama.cpp/pin.txt", "pyproject.toml"):
        text = (target / name).read_text(encoding="utf-8")
        text = text.replace(f"=={pin.release}", f"=={version}").replace(pin.digest, digest)
        (target / name).write_text(text, encoding="utf-8")


def steps(library: Path, directory: Path) -> list[list[str]]:
    """The commands that compile the bindings' source tree ``library`` and a copy of this tree, and test it, in that."""
    python, build = str(directory / "venv" / "bin" / "python"), directory / "build"
    pip = [*module_command("pip", python, ()), "install", "--quiet", "--disable-pip-version-check"]
    return [
        [*module_command("venv"), str(directory / "venv")],
        [*pip, str(library), f"--config-settings=build-dir={build}"],
        [*pip, "--editable", ".[test]"],
        [python, "-m", "pytest", "-q", *TESTS],
    ]


def run_tests(archive: Path, directory: Path) -> int:
    """Build and test in ``directory``; the exit code of the first command that fails, 0 if none does."""
    tree, library = directory / "pyctl", directory / archive.name.removesuffix(".tar.gz")
    if not tree.exists():
        pinned_copy(archive, tree)
    if not library.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(directory, filter="data")
    for command in steps(library, directory):
        print("$", " ".join(command), flush=True)
        if code := subprocess.run(command, cwd=tree, check=False).returncode:
            return code
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", type=Path, help="source tree of llama.cpp, or archive of llama-cpp-python's source")
    parser.add_argument("--test", type=Path, metavar="DIR", help="compile it in DIR, and run the tests of exactness")
    arguments = parser.parse_args()
    if arguments.test is not None and not arguments.release.is_file():
        parser.error("--test needs an archive of llama-cpp-python's source")
    with tempfile.TemporaryDirectory() as work:
        found = changes(PINNED, source_tree(arguments.release, Path(work)))
    print("\n".join(report(found)), flush=True)
    if arguments.test is not None:
        return run_tests(arguments.release, arguments.test.resolve())
    return 0 if found.is_none else 1


if __name__ == "__main__":
    sys.exit(main())
