"""The plan of `pyctl setup` for made-up machines, and its messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pyctl.errors import ConfigError
from pyctl.setup.machine import AMD, Compiler, Driver, Machine
from pyctl.setup.plan import (
    BuildPlan,
    check_compiler,
    check_room,
    describe,
    describe_build,
    duration,
    jobs_for,
    make_plan,
    missing_packages,
    parse_architectures,
)
from tests.unit.setup.machines import BARE, CARD, DRIVER, GIB, OLD_DRIVER, ON_BUS, WITH_CARD

TWO_CARDS = replace(WITH_CARD, driver=replace(DRIVER, cards=(CARD, replace(CARD, name="B", capability=(12, 0)), CARD)))
PASCAL = replace(WITH_CARD, driver=replace(DRIVER, cards=(replace(CARD, capability=(6, 1)),)))
MUSL = replace(WITH_CARD, libc="")


@pytest.mark.parametrize(
    ("machine", "options", "kind", "architectures"),
    [
        (BARE, {}, "none", ()),
        (replace(BARE, driver=Driver((13, 0), "")), {}, "none", ()),
        (BARE, {"cpu": True}, "cpu", ()),
        (WITH_CARD, {"cpu": True}, "cpu", ()),
        (WITH_CARD, {}, "pypi", ("86",)),
        (TWO_CARDS, {}, "pypi", ("86", "120")),
        (BARE, {"architectures": ("86", "90")}, "pypi", ("86", "90")),
    ],
)
def test_a_machine_gets_a_build(
    machine: Machine, options: dict[str, Any], kind: str, architectures: tuple[str, ...]
) -> None:
    plan = make_plan(machine, **options)
    assert (plan.kind, plan.architectures) == (kind, architectures)


@pytest.mark.parametrize(
    ("machine", "options", "words"),
    [
        (replace(BARE, pci_cards=(ON_BUS,)), {}, "driver is not found .*nvidia-driver-580"),
        (OLD_DRIVER, {}, "550.163.01 supports CUDA 12.4, and CUDA 13 needs driver 580"),
        (PASCAL, {}, "no support for compute capability 61"),
        (MUSL, {}, "need glibc"),
        (replace(WITH_CARD, driver=Driver((13, 0), "580", error=803)), {}, "error 803: .*restart"),
        (replace(WITH_CARD, driver=Driver((13, 0), "580", error=100)), {}, "--gpus all"),
        (replace(WITH_CARD, driver=Driver((13, 0), "580", error=5)), {}, "error 5: see the system's log"),
    ],
)
def test_what_cannot_be_built_has_a_reason(machine: Machine, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(machine, **options)


def test_a_cpu_build_says_that_it_is_one() -> None:
    assert make_plan(WITH_CARD, cpu=True).why == (
        "for the CPU only, because --cpu was given: no graphics card will be used"
    )
    amd = make_plan(replace(BARE, pci_cards=(AMD,)))
    assert amd.kind == "none"
    assert "AMD card" in amd.why


def test_lists_of_architectures_are_read_as_people_write_them() -> None:
    assert parse_architectures("86, 9.0;sm_75 120a-real,86") == ("86", "90", "75", "120a")
    for text in ("native", "8", "86-virtual", ""):
        with pytest.raises(ConfigError, match="no compute capability"):
            parse_architectures(text)


def test_missing_packages_are_one_sentence() -> None:
    assert missing_packages(BARE) == ""
    assert missing_packages(replace(BARE, headers=None)) == (
        "Python's headers are not installed: sudo apt install python3-dev "
        "(Fedora: sudo dnf install python3-devel, Arch: sudo pacman -S python)"
    )
    assert "sudo apt install g++ python3-dev" in missing_packages(replace(BARE, compiler=None, headers=None))
    with pytest.raises(ConfigError, match=r"a C\+\+ compiler is not installed: sudo apt install g\+\+ \("):
        check_compiler(replace(BARE, compiler=None, headers=None), BuildPlan("cpu", ""))


@pytest.mark.parametrize(
    ("compiler", "kind", "words"),
    [
        (Compiler("/opt/g++", "/opt/gcc", (14, 2), False, False), "cpu", "links the C[+][+] library statically"),
        (Compiler("/usr/bin/g++", "gcc", (17, 1), False, True), "pypi", "accepts g[+][+] up to 16"),
        (Compiler("/usr/bin/clang++", "clang", (23, 1), True, True), "pypi", "accepts clang up to 22"),
        (Compiler("/usr/bin/g++", "gcc", (17, 1), False, True), "cpu", ""),
        (Compiler("/usr/bin/clang++", "clang", (22, 1), True, True), "pypi", ""),
    ],
)
def test_unsuitable_compilers_are_refused(compiler: Compiler, kind: str, words: str) -> None:
    machine, plan = replace(BARE, compiler=compiler), BuildPlan(kind, "")  # type: ignore[arg-type]
    if not words:
        assert check_compiler(machine, plan) is compiler
        return
    with pytest.raises(ConfigError, match=words):
        check_compiler(machine, plan)


def test_jobs_follow_cores_and_memory() -> None:
    assert jobs_for(BARE, 0) == 16
    assert jobs_for(replace(BARE, n_ram=6 * GIB), 0) == 5
    assert jobs_for(replace(BARE, n_ram=GIB // 2), 0) == 1
    assert jobs_for(BARE, 3) == 3


def test_a_full_disk_is_said_in_advance() -> None:
    check_room(BuildPlan("cpu", ""), GIB, "/data")
    with pytest.raises(ConfigError, match=r"/data has 1\.0 GiB free, and the build needs 2\.6 GiB"):
        check_room(BuildPlan("pypi", ""), GIB, "/data")


def test_what_was_found_and_will_be_done_is_said() -> None:
    card = "found: NVIDIA GeForce RTX 3090 (24 GiB, compute capability 8.6); driver 580.95.05 (CUDA 13.0)"
    assert describe(WITH_CARD) == card
    assert describe_build(WITH_CARD, make_plan(WITH_CARD), 16).splitlines() == [
        "build: for NVIDIA GeForce RTX 3090, with CUDA 13.5.0 from PyPI",
        "       about 3 minutes with 16 jobs of /usr/bin/g++, 0.7 GB to download, 0.7 GB afterwards",
    ]
    assert describe(BARE) == "found: no NVIDIA card"


def test_durations_have_the_unit_that_fits() -> None:
    assert [duration(seconds) for seconds in (0, 119, 1600, 9000)] == [
        "1 seconds", "119 seconds", "27 minutes", "2 hours 30 minutes",
    ]  # fmt: skip
