"""Parameters of the bindings at the places that a source tree's headers have."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from pyctl.errors import ConfigError
from pyctl.machine.probe import find_compiler
from pyctl.setup.parameter_layout import Field, lay_out, place_fields

BINDINGS = """
import ctypes
class some_params(ctypes.Structure):
    _fields_ = [
        ("first", ctypes.c_int32),  # stays
        ("gone", ctypes.c_bool),
        ("type", ctypes.c_int), ("flag", ctypes.c_bool),
    ]
class same_params(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int32), ("flag", ctypes.c_bool)]
class absent_params(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int32)]
"""
HEADER = """
#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>
struct some_params { int32_t first; int type; size_t put_between; bool flag; void * at_the_end; };
struct same_params { int32_t n; bool flag; };
"""


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("laid_out", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree" / "include").mkdir(parents=True)
    (tmp_path / "tree" / "include" / "llama.h").write_text(HEADER)
    (tmp_path / "bindings").mkdir()
    (tmp_path / "bindings" / "llama_cpp.py").write_text(BINDINGS)
    return tmp_path / "tree"


def test_fields_are_where_the_headers_have_them(tree: Path) -> None:
    compiler = find_compiler()
    bindings = tree.with_name("bindings")
    assert compiler is not None
    assert lay_out(bindings, tree, compiler.cxx) == ["some_params"]
    made = module(bindings / "llama_cpp.py")
    params = made.some_params
    assert params.first.offset == 0
    assert params.type.offset == 4
    assert params.flag.offset == 16
    assert not hasattr(params, "gone")
    assert ctypes.sizeof(params) == 32
    assert [name for name, _ in made.same_params._fields_] == ["n", "flag"]
    assert lay_out(bindings, tree, compiler.cxx) == []


def test_a_header_that_does_not_compile_is_an_error(tree: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    (tree / "include" / "llama.h").write_text("#include <missing.h>\n")
    with pytest.raises(ConfigError, match="are not readable with"):
        lay_out(tree.with_name("bindings"), tree, compiler.cxx)


def test_only_differences_are_laid_out_anew() -> None:
    fields = [Field("n", 0, 4, 4), Field("flag", 4, 1, 1), Field("pointer", 8, 8, 8)]
    assert place_fields(["n", "flag", "pointer"], fields, 16) is None
    names = [name for name, _ in place_fields(["n", "pointer", "flag"], fields, 24) or ()]
    assert names == ["n", "flag", "pointer", "unknown_16"]
