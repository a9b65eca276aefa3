"""`pyctl setup` on made-up machines, without a build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pyctl.cli.setup_command import run_setup
from pyctl.errors import ConfigError
from pyctl.machine.libraries import BuiltLibraries, choose, write_built
from pyctl.machine.pin import read_pin
from pyctl.machine.probe import Machine
from tests.unit.setup.machines import BARE, ON_BUS, WITH_CARD
from tests.unit.setup.test_release_files import release

Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def run(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> Run:
    def command(machine: Machine, *arguments: str) -> tuple[int, list[str]]:
        code = run_setup(arguments, environ, lambda environ: machine)
        return code, capsys.readouterr().out.splitlines()

    return command


def build(environ: dict[str, str], *architectures: str) -> Path:
    directory = Path(environ["XDG_DATA_HOME"]) / "pyctl" / "llama" / "built"
    directory.mkdir(parents=True)
    (directory / "libllama.so").write_bytes(b"library")
    write_built(BuiltLibraries(read_pin().release, "13.5.0", architectures, (), {}, 1.0, directory))
    return directory


def test_a_machine_without_a_card_has_nothing_to_do(run: Run, tmp_path: Path) -> None:
    code, (line,) = run(BARE)
    assert code == 0
    assert line.startswith("nothing to do: this machine has no NVIDIA card")
    assert not list(tmp_path.iterdir())


def test_a_dry_run_changes_nothing(run: Run, tmp_path: Path) -> None:
    code, lines = run(WITH_CARD, "--dry-run")
    assert code == 0
    assert "build: for NVIDIA GeForce RTX 3090, with CUDA 13.5.0 from PyPI" in lines
    assert lines[-1].startswith("dry run: nothing was changed")
    assert not list(tmp_path.iterdir())


def test_what_is_built_is_not_built_again(run: Run, environ: dict[str, str]) -> None:
    directory = build(environ, "86")
    assert run(WITH_CARD, "--dry-run")[1][-1] == f"already there: {directory}"
    code, lines = run(BARE, "--arch", "86")
    assert code == 0
    assert (
        lines[-1]
        == "not checked: this machine has no NVIDIA driver, which the libraries need to load"
    )
    assert run(BARE, "--arch", "86,90", "--dry-run")[1][-1].startswith("dry run")


def test_without_a_file_that_fits_it_compiles(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(release(tmp_path / "release"))
    with pytest.raises(ConfigError, match="no terminal to give it"):  # before anything is fetched
        run(replace(WITH_CARD, compiler=None), "--release", place)
    with pytest.raises(ConfigError, match=r"a C\+\+ compiler is not installed"):
        run(replace(WITH_CARD, compiler=None), "--release", place, "--yes")
    assert "llama-cpp-python does not belong to the release" in capsys.readouterr().out
    assert run(WITH_CARD, "--release", "none", "--dry-run")[1][1].startswith(
        "build: for NVIDIA GeForce RTX 3090"
    )
    with pytest.raises(
        ConfigError, match=r"SHA256SUMS: .*to compile instead: pyctl setup --release none"
    ):
        run(WITH_CARD, "--release", str(tmp_path / "none"))


def test_another_release_is_built_where_nothing_else_is_to_do(run: Run, tmp_path: Path) -> None:
    code, lines = run(BARE, "--llama-cpp", "0.9.1", "--dry-run")
    assert code == 0
    assert (
        "build: for the CPU, as this machine has no card that llama.cpp uses through CUDA" in lines
    )
    assert lines[-1].startswith("dry run: nothing was changed")
    assert not list(tmp_path.iterdir())


def test_pinned_goes_back(run: Run, environ: dict[str, str]) -> None:
    home = build(environ).parents[1]
    choose(home, "built")
    code, (line,) = run(BARE, "--pinned")
    assert code == 0
    assert read_pin().release in line
    assert [path.name for path in (home / "llama").iterdir()] == ["built"]


@pytest.mark.parametrize(
    ("machine", "arguments", "words"),
    [
        (BARE, ["--pinned", "--llama-cpp", "0.9.1"], "not allowed with"),
        (WITH_CARD, ["--cpu", "--arch", "86"], "--arch: not allowed with argument --cpu"),
        (WITH_CARD, ["--arch", "native"], "is not a compute capability"),
        (WITH_CARD, ["--jobs", "-1"], "--jobs must be at least 1"),
        (WITH_CARD, ["--fast"], "unrecognized arguments: --fast; see pyctl setup --help"),
        (replace(WITH_CARD, compiler=None), [], r"a C\+\+ compiler is not installed"),
        (replace(BARE, pci_cards=(ON_BUS,)), [], "driver is not found"),
        (WITH_CARD, [], "no terminal to give it; pass --yes"),
    ],
)
def test_what_cannot_be_done_is_one_error(
    run: Run, machine: Machine, arguments: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(machine, *arguments)
