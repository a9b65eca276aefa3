"""The built libraries that a process uses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pyctl.machine.libraries import (
    BUILT,
    BuiltLibraries,
    covers,
    data_home,
    libraries_at,
    unused_card,
    use_libraries,
    write_built,
)
from pyctl.machine.pin import read_pin
from pyctl.machine.probe import Driver
from tests.unit.setup.machines import CARD, DRIVER, ON_BUS

RELEASE = read_pin().release
FEATURES = ("avx2", "fma")


def make(
    home: Path,
    name: str,
    architectures: tuple[str, ...] = (),
    built: float = 1.0,
    release: str = RELEASE,
) -> Path:
    directory = home / "llama" / name
    directory.mkdir(parents=True)
    (directory / "libllama.so").write_bytes(b"library")
    toolkit = "13.5.0" if architectures else ""
    write_built(BuiltLibraries(release, toolkit, architectures, FEATURES, {}, built, directory))
    return directory


def used(
    home: Path, driver: Driver | None, features: tuple[str, ...] = FEATURES, **variables: str
) -> str:
    """Return the name of the directory that a process uses; empty for the package's libraries."""
    environ = {"XDG_DATA_HOME": str(home.parent), **variables}
    chosen = use_libraries(environ, lambda: driver, lambda: features)
    if chosen is None:
        assert environ.get("LLAMA_CPP_LIB_PATH") == variables.get("LLAMA_CPP_LIB_PATH")
        return ""
    assert environ["LLAMA_CPP_LIB_PATH"] == str(chosen.directory)
    assert environ["MTMD_CPP_LIB"] == variables.get("MTMD_CPP_LIB", str(chosen.directory))
    return chosen.directory.name


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "pyctl"


def test_without_a_build_nothing_is_looked_at(home: Path) -> None:
    def refuse() -> Driver | None:
        raise AssertionError

    assert use_libraries({"XDG_DATA_HOME": str(home.parent)}, refuse) is None
    make(home, "cpu")
    environ = {"XDG_DATA_HOME": str(home.parent)}
    chosen = use_libraries(environ, refuse, lambda: FEATURES)  # a build for the CPU needs no driver
    assert chosen is not None
    assert chosen.directory == home / "llama" / "cpu"


def test_a_build_fits_release_cards_and_cpu(home: Path) -> None:
    make(home, "cuda", ("86",))
    assert used(home, DRIVER) == "cuda"
    assert used(home, None) == ""
    assert used(home, replace(DRIVER, cards=())) == ""
    assert used(home, replace(DRIVER, cards=(CARD, replace(CARD, capability=(9, 0))))) == ""
    assert used(home, DRIVER, ("avx2",)) == ""  # another machine has this home directory, too
    make(home, "older", ("86",), 3.0, "0.3.35")
    assert used(home, DRIVER) == "cuda"


def test_the_newest_build_that_fits_is_used(home: Path) -> None:
    make(home, "cuda", ("86",), built=1.0)
    make(home, "cpu", built=2.0)
    assert used(home, DRIVER) == "cpu"
    make(home, "both", ("86", "90"), built=3.0)
    assert used(home, DRIVER) == "both"
    assert used(home, None) == "cpu"


def test_what_the_user_names_wins(home: Path, tmp_path: Path) -> None:
    make(home, "cuda", ("86",))
    assert used(home, DRIVER, PYCTL_LIBS="package") == ""
    assert used(home, DRIVER, LLAMA_CPP_LIB_PATH="/opt/llama") == ""
    assert used(home, DRIVER, MTMD_CPP_LIB="/opt/mtmd") == "cuda"
    make(tmp_path / "other", "elsewhere", ("86",))
    assert used(home, DRIVER, PYCTL_LIBS=str(tmp_path / "other")) == "elsewhere"
    assert data_home({"HOME": "/", "PYCTL_LIBS": "/data"}) == Path("/data")


def test_damaged_builds_are_left_out(home: Path) -> None:
    cut = make(home, "cut", ("86",), 5.0)
    (cut / "libllama.so").write_bytes(b"lib")
    (make(home, "empty", ("86",), 4.0) / BUILT).write_text("{}")
    (make(home, "broken", ("86",), 4.0) / BUILT).write_text("no JSON")
    lists = make(home, "lists", ("86",), 4.0) / BUILT
    lists.write_text(json.dumps({**json.loads(lists.read_text()), "files": []}))
    make(home, ".unchecked", ("86",), 4.0)
    whole = make(home, "whole", ("86",), 1.0) / BUILT
    whole.write_text(json.dumps({**json.loads(whole.read_text()), "of": "an older pyctl"}))
    assert [built.directory.name for built in libraries_at(home)] == ["whole"]


def test_machine_code_runs_on_later_minor_versions() -> None:
    assert covers(("86",), (8, 9))
    assert not covers(("89",), (8, 6))
    assert not covers(("90",), (8, 6))
    assert not covers(("120a",), (12, 1))
    assert covers(("120a",), (12, 0))


def test_an_idle_card_is_one_line(home: Path) -> None:
    """A card that the libraries do not use is named in one line with the reason and the remedy. A
    user who chose so, or has no card, gets no line.
    """
    environ = {"XDG_DATA_HOME": str(home.parent)}

    def line(driver: Driver | None, **variables: str) -> str:
        return unused_card({**environ, **variables}, lambda: driver, lambda: (ON_BUS,))

    assert line(DRIVER) == (
        "NVIDIA GeForce RTX 3090 is idle: these libraries of llama.cpp use the CPU only; "
        "to build them for it: pyctl setup"
    )
    make(home, "new", ("90",))
    assert (
        f"its libraries were built for other cards, another CPU or not for llama.cpp {RELEASE}"
        in line(DRIVER)
    )
    assert "driver is not available" in line(None)
    assert "reports error 803" in line(Driver((13, 0), "580", error=803))
    assert line(DRIVER, PYCTL_LIBS="package") == ""
    assert line(Driver((13, 0), "580", error=100), CUDA_VISIBLE_DEVICES="") == ""
    assert unused_card(environ, lambda: None, lambda: ()) == ""
