"""Another release of llama.cpp: its source, its build with made-up programs, and the choice of
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyctl.machine.libraries import (
    MODULES,
    choose,
    libraries_in_use,
    unused_choice,
    use_libraries,
    use_release,
)
from pyctl.machine.probe import Compiler
from pyctl.setup.build import Build, compile_extension, place_libraries, stage_libraries
from pyctl.setup.source import Release, open_release
from pyctl.setup.toolkit import BuildTools
from tests.unit.setup.source_trees import DISTRIBUTION, write

NINJA = """#!/bin/sh
case $5 in -k) cd $2; touch _core.cpython.so; echo 'FAILED: [code=1] CMakeFiles/_pool.dir/csrc/pool/a.cpp.o
a.cpp:1: note: here
a.cpp:7:3: error: no such name
[2/3] Building CXX object CMakeFiles/_pool.dir/csrc/pool/b.cpp.o
FAILED: [code=1] CMakeFiles/_core.dir/csrc/core/c.cpp.o
c.cpp:1:1: error: of another module'; exit 1;; esac
"""


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return open_release([], str(write(tmp_path / "source", DISTRIBUTION)), tmp_path / "work")


@pytest.fixture
def build(tmp_path: Path, release: Release) -> Build:
    ninja = write(tmp_path, {"ninja": NINJA}) / "ninja"
    ninja.chmod(0o755)
    tools = BuildTools("true", str(ninja))
    compiler = Compiler("c++", "cc", True)
    return Build(tmp_path / "work", compiler, tools, 2, release=release)


def chosen(build: Build, home: Path) -> Path:
    """Return the directory of a finished build of `release` that is chosen, with `_core` alone."""
    write(
        build.directory / "extension", {"_core.cpython.so": "module", "_pool.cpython.so": "older"}
    )
    write(build.directory / "bin", {"libllama.so": "library"})
    missing = {"_drafts": "too new", "_pool": "other names"}
    target = place_libraries(stage_libraries(build, home, 7.0, missing))
    choose(home, target.name)
    return target


def test_a_module_that_does_not_compile_has_a_reason(build: Build, release: Release) -> None:
    missing = compile_extension(build, release)
    assert missing == {"_drafts": "it does not compile", "_pool": "error: no such name"}


def test_a_chosen_build_brings_its_bindings_and_modules(build: Build, tmp_path: Path) -> None:
    """A process uses the bindings and modules of the chosen build. A module that the build lacks is
    an import error with the reason, and not the module of another release.
    """
    environ = {"XDG_DATA_HOME": str(tmp_path / "data")}
    target = chosen(build, tmp_path / "data" / "pyctl")
    used = use_libraries(environ, lambda: None)
    assert used is not None
    assert environ["LLAMA_CPP_LIB_PATH"] == str(target)
    assert used.release == "0.9.1"
    assert used.is_tried is True
    assert sorted(used.missing) == ["_drafts", "_pool"]
    assert not (target / "bindings" / "llama_cpp" / "lib").exists()
    assert [path.name for path in (target / "extension").iterdir()] == ["_core.cpython.so"]
    path: list[str] = []
    finders: list[Any] = []
    use_release(environ, path, finders)
    assert path == [str(target / "bindings")]
    (finder,) = finders
    find = finder.find_spec
    assert find("pyctl.cache") is find("_core") is None
    for name, reason in {**used.missing, "_core": "is missing"}.items():
        with pytest.raises(ModuleNotFoundError, match=reason):
            find(f"pyctl.{name}")
    assert set(MODULES) == {*used.missing, "_core"}


def test_a_chosen_build_that_does_not_fit_is_not_used_and_said(
    build: Build, tmp_path: Path
) -> None:
    """A build of another pyctl, for another machine, or with a damaged file is not used, and the
    reason is named. Loading it could crash the process.
    """
    home = tmp_path / "data" / "pyctl"
    environ = {"XDG_DATA_HOME": str(tmp_path / "data")}
    target = chosen(build, home)
    used = dict(environ)
    assert use_libraries(used) == libraries_in_use(used)
    assert unused_choice(used) == ""
    built = json.loads((target / "built.json").read_text())
    older = {"digests": {"csrc": "of an older pyctl"}}
    larger = {"features": ["sve9"]}
    for change, words in ((older, "another release of pyctl"), (larger, "machine")):
        (target / "built.json").write_text(json.dumps({**built, **change}))
        assert use_libraries(dict(environ)) is None
        assert words in unused_choice(environ)
    (target / "built.json").write_text(json.dumps(built))
    (target / "bindings" / "llama_cpp" / "llama_cpp.py").write_text("half")
    assert use_libraries(dict(environ)) is None
    assert "missing or damaged" in unused_choice(environ)
    choose(home, "")
    assert unused_choice(environ) == ""
