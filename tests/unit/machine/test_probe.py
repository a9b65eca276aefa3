"""Detection of the machine: a made-up driver, bus, container, and programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyctl.machine.probe import (
    AMD,
    NVIDIA,
    Card,
    Driver,
    find_compiler,
    find_driver,
    find_pci_cards,
    free_bytes,
    probe_machine,
)
from tests.unit.setup.machines import BARE, OLD_DRIVER, WITH_CARD, build_libcuda, set_variable


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_libcuda(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def answers(request: pytest.FixtureRequest) -> Iterator[None]:
    for name, value in request.param.items():
        set_variable(name, value)
    yield
    for name in request.param:
        set_variable(name, "")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def program(directory: Path, name: str, script: str) -> Path:
    path = directory / name
    write(path, f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_no_library_is_no_driver(tmp_path: Path) -> None:
    assert find_driver([str(tmp_path / "libcuda.so.1")]) is None


@pytest.mark.parametrize(
    ("answers", "driver"),
    [
        ({}, Driver((13, 0), "", (Card("Card 0", (8, 6), 24 * 2**30),))),
        (
            {"FAKE_CARDS": "2", "FAKE_FIRST": "120", "FAKE_SECOND": "75"},
            Driver(
                (13, 0),
                "",
                (Card("Card 0", (12, 0), 24 * 2**30), Card("Card 1", (7, 5), 24 * 2**30)),
            ),
        ),
        ({"FAKE_CUDA": "12080", "FAKE_INIT": "803"}, Driver((12, 8), "", error=803)),
        ({"FAKE_ATTRIBUTE": "1"}, Driver((13, 0), "", error=1)),
        ({"FAKE_CARDS": "0"}, Driver((13, 0), "")),
    ],
    indirect=["answers"],
)
def test_a_driver_is_asked_for_its_cards(
    answers: None, driver: Driver, libcuda: Path, tmp_path: Path
) -> None:
    # Of several places the first that loads answers.
    assert find_driver([str(tmp_path / "none.so"), str(libcuda)], root=tmp_path) == driver


def test_the_kernel_module_names_the_release(libcuda: Path, tmp_path: Path) -> None:
    write(tmp_path / "sys/module/nvidia/version", "580.159.03\n")
    driver = find_driver([str(libcuda)], root=tmp_path)
    assert driver is not None
    assert driver.release == "580.159.03"


def test_cards_on_the_bus_need_no_driver(tmp_path: Path) -> None:
    for address, vendor, kind in (
        ("0000:02:00.0", NVIDIA, "0x030200"),
        ("0000:01:00.0", AMD, "0x038000"),
        ("0000:02:00.1", NVIDIA, "0x040300"),  # the sound of a card
        ("0000:00:02.0", "0x8086", "0x030000"),
    ):
        write(tmp_path / "sys/bus/pci/devices" / address / "vendor", vendor + "\n")
        write(tmp_path / "sys/bus/pci/devices" / address / "class", kind + "\n")
    assert find_pci_cards(tmp_path) == (AMD, NVIDIA)
    assert find_pci_cards(tmp_path / "none") == ()


def test_a_card_counts_with_a_driver_or_without() -> None:
    assert not BARE.has_nvidia
    assert WITH_CARD.has_nvidia
    assert [card.architecture for card in OLD_DRIVER.cards] == ["86"]


def test_a_compiler_has_to_compile_and_to_share_its_library(tmp_path: Path) -> None:
    broken = program(tmp_path, "broken", "exit 1")
    script = 'while [ "$1" != -o ]; do shift; done; echo $LIB > $2'
    alone = program(tmp_path, "alone", "LIB=none; " + script)
    shared = program(tmp_path, "shared", "LIB=libstdc++.so.6; " + script)
    found = {
        name: find_compiler({"CXX": str(path)})
        for name, path in (("alone", alone), ("shared", shared))
    }
    assert found["shared"] is not None
    assert found["shared"].cxx == str(shared)
    others = find_compiler({"CXX": str(broken), "PATH": ""})
    assert others is None or others.cxx == "/usr/bin/g++"
    assert found["alone"] is not None
    assert found["alone"].cxx in (str(alone), "/usr/bin/g++")


def test_containers_limit_cores_and_memory(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal:       32768000 kB\n")
    machine = probe_machine(root=tmp_path)
    assert machine.n_ram == 32768000 * 1024
    write(tmp_path / "sys/fs/cgroup/cpu.max", "50000 100000\n")
    write(tmp_path / "sys/fs/cgroup/memory.max", "1073741824\n")
    machine = probe_machine(root=tmp_path)
    assert machine.n_cores == 1
    assert machine.n_ram == 2**30
    write(tmp_path / "sys/fs/cgroup/cpu.max", "max 100000\n")
    write(tmp_path / "sys/fs/cgroup/memory.max", "max\n")
    assert probe_machine(root=tmp_path).n_ram == 32768000 * 1024


def test_room_is_that_of_the_nearest_directory(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet") > 0
