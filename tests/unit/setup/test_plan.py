"""The plan of `pyctl setup` for made-up machines, and its messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pyctl.errors import ConfigError
from pyctl.machine.probe import AMD, Compiler, Driver, Machine
from pyctl.setup.plan import (
    BuildPlan,
    check_compiler,
    check_room,
    describe,
    describe_build,
    jobs_for,
    make_plan,
    parse_architectures,
)
from tests.unit.setup.machines import BARE, CARD, DRIVER, GIB, OLD_DRIVER, ON_BUS, WITH_CARD

TWO_CARDS = replace(
    WITH_CARD,
    driver=replace(DRIVER, cards=(CARD, replace(CARD, name="B", capability=(12, 0)), CARD)),
)
PASCAL = replace(WITH_CARD, driver=replace(DRIVER, cards=(replace(CARD, capability=(6, 1)),)))
MUSL = replace(WITH_CARD, libc="")


@pytest.mark.parametrize(
    ("machine", "options", "is_needed", "architectures"),
    [
        (BARE, {}, False, ()),
        (replace(BARE, driver=Driver((13, 0), "")), {}, False, ()),
        (BARE, {"cpu": True}, True, ()),
        (WITH_CARD, {"cpu": True}, True, ()),
        (WITH_CARD, {}, True, ("86",)),
        (TWO_CARDS, {}, True, ("86", "120")),
        (BARE, {"architectures": ("86", "90")}, True, ("86", "90")),
    ],
)
def test_a_machine_gets_a_build(
    machine: Machine, options: dict[str, Any], is_needed: bool, architectures: tuple[str, ...]
) -> None:
    plan = make_plan(machine, **options)
    assert plan.is_needed == is_needed
    assert plan.architectures == architectures


@pytest.mark.parametrize(
    ("machine", "options", "words"),
    [
        (replace(BARE, pci_cards=(ON_BUS,)), {}, "driver is not found .*nvidia-driver-580"),
        (OLD_DRIVER, {}, "the NVIDIA driver supports CUDA 12.4, and CUDA 13 needs driver 580"),
        (PASCAL, {}, "no support for compute capability 61"),
        (MUSL, {}, "need glibc"),
        (replace(WITH_CARD, driver=Driver((13, 0), "580", error=803)), {}, "error 803: .*restart"),
        (replace(WITH_CARD, driver=Driver((13, 0), "580", error=100)), {}, "--gpus all"),
        (
            replace(WITH_CARD, driver=Driver((13, 0), "580", error=5)),
            {},
            "error 5: see the system's log",
        ),
    ],
)
def test_what_cannot_be_built_has_a_reason(
    machine: Machine, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(machine, **options)


def test_a_cpu_build_says_that_it_is_one() -> None:
    assert make_plan(WITH_CARD, cpu=True).why == (
        "for the CPU only, because --cpu was given: no graphics card will be used"
    )
    amd = make_plan(replace(BARE, pci_cards=(AMD,)))
    assert not amd.is_needed
    assert "AMD card" in amd.why


def test_lists_of_architectures_are_read_as_people_write_them() -> None:
    assert parse_architectures("86, 9.0;sm_75 120a-real,86") == ("86", "90", "75", "120a")
    for text in ("native", "8", "86-virtual", ""):
        with pytest.raises(ConfigError, match="is not a compute capability"):
            parse_architectures(text)
    with pytest.raises(ConfigError, match=r"no card has the compute capability 99\.9"):
        parse_architectures("999")


def test_a_compiler_is_there_and_shares_its_library() -> None:
    assert check_compiler(BARE) is BARE.compiler
    with pytest.raises(
        ConfigError, match=r"a C\+\+ compiler is not installed: sudo apt install g\+\+ \("
    ):
        check_compiler(replace(BARE, compiler=None))
    with pytest.raises(ConfigError, match=r"/opt/g\+\+ links the C\+\+ library statically"):
        check_compiler(replace(BARE, compiler=Compiler("/opt/g++", "/opt/gcc", False)))


def test_jobs_follow_cores_and_memory() -> None:
    assert jobs_for(BARE, 0) == 16
    assert jobs_for(replace(BARE, n_ram=6 * GIB), 0) == 5
    assert jobs_for(replace(BARE, n_ram=GIB // 2), 0) == 1
    assert jobs_for(BARE, 3) == 3


def test_a_full_disk_is_said_in_advance() -> None:
    check_room(BuildPlan(""), GIB, "/data")
    with pytest.raises(ConfigError, match=r"/data has 1\.0 GiB free, and the build needs 2\.6 GiB"):
        check_room(BuildPlan("", ("86",)), GIB, "/data")


def test_what_was_found_and_will_be_done_is_said() -> None:
    card = (
        "found: NVIDIA GeForce RTX 3090 (24 GiB, compute capability 8.6); driver 580.95.05 "
        "(CUDA 13.0)"
    )
    assert describe(WITH_CARD) == card
    assert describe_build(check_compiler(BARE), make_plan(WITH_CARD), 16).splitlines() == [
        "build: for NVIDIA GeForce RTX 3090, with CUDA 13.5.0 from PyPI",
        "       about 3 minutes with 16 jobs of /usr/bin/g++",
    ]
    assert describe(BARE) == "found: no NVIDIA card"
