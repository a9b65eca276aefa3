"""Structures of parameters in the bindings, laid out as a source tree's headers have them.

Bindings of another release have the fields of theirs. A tree may have a new field between them, or
lack one, and ctypes derives places from the order. The C++ compiler reports the place of each
field.
"""

from __future__ import annotations

import ast
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyctl.errors import ConfigError

__all__ = ["Field", "lay_out", "place_fields"]

HEADERS = {"llama_cpp.py": ("include", "llama.h"), "mtmd_cpp.py": ("tools/mtmd", "mtmd.h")}
"""Modules of the bindings, and the directory and name of the header with the structures that they
declare.
"""

INCLUDED = ("include", "ggml/include")
"""Directories of the headers that those include."""

SUFFIX = "_params"
"""End of the names of structures that llama.cpp returns by value, filled with defaults, and that
grow.
"""

COMPILE_SECONDS = 120.0


@dataclass(frozen=True)
class Field:
    """A field of a structure: its place, size and alignment in bytes."""

    name: str
    offset: int
    size: int
    alignment: int


@dataclass(frozen=True)
class _Declared:
    """A structure of the bindings: its ``fields`` in order, as name and source text, and the
    ``node`` of their list.
    """

    name: str
    fields: Mapping[str, str]
    node: ast.expr


def lay_out(bindings: Path, tree: Path, cxx: str) -> list[str]:
    """Rewrite the structures of parameters in the package at ``bindings`` whose fields are
    elsewhere in ``tree``.

    Returns their names. Raises ConfigError if ``cxx`` does not compile the headers.
    """
    changed = []
    for module, (directory, header) in HEADERS.items():
        file = bindings / module
        if not file.exists() or not (tree / directory / header).exists():
            continue
        source = file.read_text(encoding="utf-8")
        declared = list(_declared(source))
        sizes = _query_compiler(declared, tree, (directory, *INCLUDED), header, cxx)
        for structure in reversed(declared):  # from the end, so that places before stay valid
            if structure.name not in sizes:
                continue  # the tree has none of this name
            size, fields = sizes[structure.name]
            listing = place_fields(list(structure.fields), fields, size)
            if listing is not None:
                elements = [
                    structure.fields.get(name, f'("{name}", {text})') for name, text in listing
                ]
                source = _replaced(source, structure.node, f"[{', '.join(elements)}]")
                changed.append(structure.name)
        if changed:
            file.write_text(source, encoding="utf-8")
    return changed[::-1]


def _declared(source: str) -> Iterator[_Declared]:
    """Yield the structures of parameters that the module ``source`` declares with a list of
    fields.
    """
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or not node.name.endswith(SUFFIX):
            continue
        for statement in node.body:
            if (
                isinstance(statement, ast.Assign)
                and ast.unparse(statement.targets[0]) == "_fields_"
            ):
                assert isinstance(statement.value, ast.List)
                texts = {
                    ast.literal_eval(element.elts[0]): ast.unparse(element)
                    for element in statement.value.elts
                    if isinstance(element, ast.Tuple)
                }
                yield _Declared(node.name, texts, statement.value)


def place_fields(
    known: Sequence[str], fields: Sequence[Field], size: int
) -> list[tuple[str, str]] | None:
    """Return the names of the ``fields`` of a structure of ``size`` bytes in their order, each with
    "", and between them fillers with their type.

    Returns None if the bindings have the ``known`` fields at the same places.
    """
    placed: list[tuple[str, str]] = []
    end = 0
    alignment = 1

    def skip(to: int) -> None:
        if to > end:
            placed.append((f"unknown_{end}", f"__import__('ctypes').c_uint8 * {to - end}"))

    for field in sorted(fields, key=lambda each: each.offset):
        if field.offset != _aligned(end, field.alignment):
            skip(field.offset)
        placed.append((field.name, ""))
        end = field.offset + field.size
        alignment = max(alignment, field.alignment)
    if size != _aligned(end, alignment):
        skip(size)
    return placed if [name for name, _ in placed] != list(known) else None


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _replaced(source: str, node: ast.expr, text: str) -> str:
    """Return ``source`` with ``text`` in place of ``node``."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = source.splitlines(keepends=True)
    before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    after = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    return "".join([*lines[: node.lineno - 1], before, text, after, *lines[node.end_lineno :]])


# -- asking the compiler
# ----------------------------------------------------------------------------------

PROBE = """
#include <cstddef>
#include <cstdio>
{structures}
#include "{header}"
template <typename T, size_t n = sizeof(T)> bool open_line(const char * name, int) {{
    std::printf("%s %zu", name, n);
    return true;
}}
template <typename T> bool open_line(const char *, long) {{ return false; }}
{fields}
int main() {{
{calls}
}}
"""
"""Prints a line for each structure that the header defines: name, size, then name, offset, size and
alignment of each field that it has.
"""

FIELD = """
template <typename T, typename M = decltype(T::{name})> void put_{name}(int) {{
    std::printf(" {name} %zu %zu %zu", offsetof(T, {name}), sizeof(M), alignof(M));
}}
template <typename T> void put_{name}(long) {{}}
"""


def _query_compiler(
    declared: Sequence[_Declared], tree: Path, places: Sequence[str], header: str, cxx: str
) -> dict[str, tuple[int, list[Field]]]:
    """Return the size of each structure that ``header`` defines, and of its declared fields
    that exist.
    """
    names = dict.fromkeys(name for structure in declared for name in structure.fields)
    calls = []
    for structure in declared:
        calls.append(f'if (open_line<struct {structure.name}>("{structure.name}", 0)) {{')
        calls += [f"put_{name}<struct {structure.name}>(0);" for name in structure.fields]
        calls.append("std::putchar('\\n'); }")
    text = PROBE.format(
        header=header,
        structures="\n".join(f"struct {structure.name};" for structure in declared),
        fields="".join(FIELD.format(name=name) for name in names),
        calls="\n".join(calls),
    )
    return dict(
        map(_parsed, _run(text, [tree / directory for directory in places], cxx).splitlines())
    )


def _parsed(line: str) -> tuple[str, tuple[int, list[Field]]]:
    name, size, *rest = line.split()
    fields = [Field(rest[i], *map(int, rest[i + 1 : i + 4])) for i in range(0, len(rest), 4)]
    return name, (int(size), fields)


def _run(text: str, places: Sequence[Path], cxx: str) -> str:
    """Return the output of the program ``text``, compiled by ``cxx``. Raises ConfigError."""
    with tempfile.TemporaryDirectory(prefix="pyctl-") as directory:
        source = Path(directory) / "probe.cpp"
        program = Path(directory) / "probe"
        source.write_text(text, encoding="utf-8")
        command = [
            cxx,
            "-std=c++17",
            "-w",
            *(f"-I{place}" for place in places),
            str(source),
            "-o",
            str(program),
        ]
        try:
            subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS
            )
            return subprocess.run(
                [program], capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS
            ).stdout
        except (OSError, subprocess.SubprocessError) as error:
            lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
            reason = next((line for line in lines if "error:" in line), lines[-1] if lines else "")
            raise ConfigError(
                f"the parameters of llama.cpp are not readable with {cxx}: {reason}"
            ) from error
