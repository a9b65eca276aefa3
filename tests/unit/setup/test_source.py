"""The source of llama.cpp: fetched and verified, a directory, or an archive."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import pytest

from pyctl.errors import ConfigError
from pyctl.machine.pin import read_pin
from pyctl.processes.module_command import module_command
from pyctl.setup.source import open_release, pip_command, unpack_source
from tests.unit.setup.programs import PIP, Programs
from tests.unit.setup.source_trees import DISTRIBUTION, TREE, write


def test_a_source_is_a_directory_or_an_archive_with_its_hash(tmp_path: Path) -> None:
    source = write(tmp_path / "llama_cpp_python-0.9.1", {**DISTRIBUTION, "setup.sh": ""})
    archive = tmp_path / "any name.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, source.name)
    found = open_release([], str(archive), tmp_path / "work")
    assert found.name == "0.9.1"
    assert found.version == "0.9.1"
    assert found.digest == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert found.tree.is_relative_to(tmp_path / "work")
    tree = open_release([], str(write(tmp_path / "llama.cpp", TREE)), tmp_path / "work")
    assert tree.name == "tree-0.7.2"
    assert tree.version == read_pin().release
    assert tree.digest == ""
    assert tree.bindings.name == "llama_cpp"


@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_what_is_no_source_is_one_error(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    if damage != "missing":
        with tarfile.open(path, "w:gz") as tar:
            tar.add(write(tmp_path / "llama.cpp", {"a": "text" * 5000}), "llama.cpp")
        path.write_bytes(path.read_bytes()[: 40 if damage == "cut" else 0])
    with pytest.raises(ConfigError, match=r"a\.tar\.gz"):
        open_release([], str(path), tmp_path / "work")


@pytest.mark.parametrize(
    "name", ["x/{}/evil", "x/../../evil", "x/a/../../../evil", "x//evil", "x/./evil"]
)
def test_an_archive_writes_nothing_elsewhere(name: str, tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    archive = tmp_path / "a.tar.gz"
    work = tmp_path / "work" / "deep"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(write(tmp_path / "llama.cpp", TREE), "llama.cpp")
        tar.add(write(tmp_path, {"evil": "evil"}) / "evil", name.format(elsewhere))
        assert not name.startswith("x/{}") or tar.getnames()[-1] == f"x/{elsewhere}/evil"
    (tmp_path / "evil").unlink()
    with pytest.raises(ConfigError, match=r"evil' is not a path below a directory"):
        open_release([], str(archive), work)
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("bound", [{"max_bytes": 10_000}, {"max_members": 3}])
def test_an_archive_cannot_fill_the_disk(bound: dict[str, int], tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    target = tmp_path / "new"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(write(tmp_path / "llama.cpp", {**TREE, "large": "text" * 5000}), "llama.cpp")
    with pytest.raises(ValueError, match="it holds more than"):
        unpack_source(archive, target, below="/", **bound)
    assert not (target / "large").exists()


def test_the_source_is_fetched_once_and_verified(programs: Programs, work: Path) -> None:
    pip = [programs.make("pip", PIP)]
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"llama_cpp\.tar\.gz is not the pinned release; remove it"
        ):
            open_release(pip, "", work)
    (call,) = programs.called()
    assert "--require-hashes" in call
    assert str(read_pin().path) in call


def test_pip_is_that_of_this_environment(work: Path) -> None:
    assert pip_command(work) == module_command("pip")


def test_a_pip_that_brings_no_source_is_an_error(programs: Programs, work: Path) -> None:
    pip = [programs.make("pip", "exit 0")]
    with pytest.raises(
        ConfigError, match="pip ended well, but fetched no source of llama-cpp-python=="
    ):
        open_release(pip, "", work)
