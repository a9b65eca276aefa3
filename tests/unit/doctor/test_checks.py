"""Each check reports its problem with a fix, and reports nothing on a sound machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyctl.doctor.examine import CHECKS, examine, screen
from pyctl.errors import ModelError
from pyctl.machine.libraries import unused_card
from pyctl.machine.probe import Driver
from tests.unit.doctor.machines import AT_REST, GIB, PCI_CARD, QUIET, RTX_3090, desktop

MOUNTS = "22 1 8:1 / / rw - {} {} rw\n"


def broken(code: int) -> Callable[[], Driver]:
    return lambda: Driver((13, 0), "580.95.05", error=code)


def states(**changes: Any) -> Callable[[], Any]:
    return lambda: (AT_REST._replace(**changes),)


def refuse(*_: object) -> Any:
    raise ModelError("cannot make the context: 9 tokens need too much")


def idle_card() -> str:
    return unused_card(
        {"XDG_DATA_HOME": "/nowhere"}, lambda: Driver((13, 0), "580", (RTX_3090,)), lambda: ()
    )


FOUND = {
    "no driver": (
        "driver",
        {},
        {"find_driver": lambda: None},
        "no driver",
        ("apt install nvidia-driver-580"),
    ),
    "no driver in a container": (
        "driver",
        {".dockerenv": ""},
        {"find_driver": lambda: None},
        "no driver",
        "--gpus all",
    ),
    "old kernel module": (
        "driver",
        {},
        {"find_driver": broken(803)},
        ("kernel module differ"),
        ("restart the machine"),
    ),
    "no device file": (
        "driver",
        {},
        {"find_driver": broken(999)},
        "fails to start",
        "nvidia-modprobe -u",
    ),
    "another code": ("driver", {}, {"find_driver": broken(7)}, "cuInit 7", "nvidia-smi"),
    "old driver": (
        "driver",
        {},
        {"find_driver": lambda: Driver((12, 4), "550.54", (RTX_3090,))},
        "driver 550.54 speaks CUDA 12.4, this build needs CUDA 13",
        "580",
    ),
    "CPU build": (
        "build",
        {},
        {"gpus": list, "idle_card": idle_card},
        ("RTX 3090 is idle"),
        "pyctl setup",
    ),
    "other release": (
        "llama.cpp",
        {},
        {"error": ("built for 0.5, 0.6 is loaded")},
        "0.6 is loaded",
        "reinstall",
    ),
    "pageable": (
        "pinned memory",
        {},
        {"pin_error": lambda: "code 2"},
        ("cannot be pinned: code 2"),
        "driver",
    ),
    "few lanes": (
        "PCIe link",
        {},
        {"card_states": states(lanes=(4, 16))},
        ("4 of 16 PCIe lanes"),
        "slot",
    ),
    "old slot": (
        "PCIe link",
        {},
        {"card_states": states(generations=(3, 4))},
        ("card take 2 times"),
        "slot",
    ),
    "overcommit": (
        "overcommit",
        {"proc/sys/vm/overcommit_memory": "2"},
        {},
        "is 2",
        "overcommit_memory=0",
    ),
    "container": (
        "container",
        {"sys/fs/cgroup/memory.max": str(8 * GIB)},
        {"ram_bytes": 16 * GIB},
        "may use 8.0 GiB",
        "--cache-ram 4096",
    ),
    "older container": (
        "container",
        {
            "proc/self/cgroup": "4:memory:/d/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
        },
        {"ram_bytes": 16 * GIB},
        "may use 4.0 GiB",
        "--cache-ram 2048",
    ),
    "locked memory": (
        "locked memory",
        {},
        {"locks_memory": True, "limit_of": lambda number: (64, 64)},
        "--mlock needs",
        "ulimit -l",
    ),
    "cut off": (
        "model",
        {},
        {"file": lambda path: (1101, True)},
        ("cut off: 1,000 bytes of 1,101"),
        "again",
    ),
    "no GGUF": ("model", {}, {"file": refuse}, "cannot make", "again"),
    "no template": (
        "chat template",
        {},
        {"file": lambda path: (1000, False)},
        "ChatML",
        "--chat-template-file",
    ),
    "no such file": (
        "model",
        {},
        {"model_files": (Path("/nowhere/model.gguf"),)},
        "no file /nowhere",
        "-m",
    ),
    "model far away": (
        "model's disk",
        {"proc/self/mountinfo": MOUNTS.format("nfs4", "nas:/models")},
        {},
        "nfs4",
        "local SSD",
    ),
    "cache in RAM": (
        "cache directory",
        {"proc/self/mountinfo": MOUNTS.format("tmpfs", "tmpfs")},
        {},
        "does not outlive",
        "SSD",
    ),
    "no space": ("disk space", {}, {"cache_bytes": 2**60}, "GiB free", "--kv-cache-budget"),
    "plan": (
        "memory plan",
        {},
        {"plan": lambda: [("CUDA0 has 9 MiB too little; what would help: -np 1")]},
        "9 MiB too little",
        "-np 1",
    ),
    "refused": ("memory plan", {}, {"plan": refuse}, "cannot make the context", "-c"),
}
"""Check, other files, other facts, and parts of the finding and of its fix."""


def test_nothing_is_wrong_with_a_good_machine(tmp_path: Path) -> None:
    found = examine(desktop(tmp_path))
    assert found.findings == ()
    assert found.is_sound
    assert set(found.absent) == {"container", "locked memory"}


@pytest.mark.parametrize("case", FOUND)
def test_a_check_finds_what_it_is_for(tmp_path: Path, case: str) -> None:
    name, files, changes, text, fix = FOUND[case]
    found = examine(
        desktop(tmp_path, files, **changes), [check for check in CHECKS if check.name == name]
    )
    (finding,) = found.findings
    assert finding.level in ("wrong", "slow")
    assert text in finding.text
    assert fix in finding.fix
    assert not found.is_sound


def test_a_cache_of_the_default_size_fits_its_container(tmp_path: Path) -> None:
    found = examine(desktop(tmp_path, {"sys/fs/cgroup/memory.max": str(8 * GIB)}))
    assert found.findings == ()


def test_every_check_is_tried() -> None:
    assert {check.name for check in CHECKS} == {case[0] for case in FOUND.values()}


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("overcommit", "proc/sys/vm/overcommit_memory"),
        ("container", "sys/fs/cgroup/user.slice/memory.max"),
        ("cache directory", "proc/self/mountinfo"),
    ],
)
def test_a_check_that_cannot_be_made_says_so(tmp_path: Path, name: str, missing: str) -> None:
    found = examine(
        desktop(tmp_path, {missing: None}, ram_bytes=GIB),
        [check for check in CHECKS if check.name == name],
    )
    (finding,) = found.findings
    assert finding.level == "unknown"
    assert found.fine == ()
    assert found.is_sound  # nothing is known to be wrong


def test_without_libraries_their_checks_are_unknown(tmp_path: Path) -> None:
    found = examine(
        desktop(
            tmp_path, card_states=lambda: None, error="no libllama.so", gpus=_unknown, cuda=_unknown
        )
    )
    levels = {finding.check: finding.level for finding in found.findings}
    assert levels["llama.cpp"] == "wrong"
    assert {levels[name] for name in ("driver", "build", "pinned memory", "PCIe link")} == {
        "unknown"
    }


def _unknown() -> Any:
    from pyctl.doctor.finding import UnknownError

    raise UnknownError("not loaded")


def test_a_machine_without_a_card_has_no_findings_of_cards(tmp_path: Path) -> None:
    found = examine(desktop(tmp_path, dict.fromkeys(PCI_CARD), gpus=list, cuda=lambda: 0))
    assert found.findings == ()
    assert {"driver", "build", "pinned memory", "PCIe link"} <= set(found.absent)


def test_the_nearest_mount_counts(tmp_path: Path) -> None:
    text = f"{QUIET['proc/self/mountinfo']}23 22 0:40 / {tmp_path} rw - nfs4 nas:/x rw\n"
    facts = desktop(tmp_path, {"proc/self/mountinfo": text})
    assert facts.mount_of(tmp_path / "not" / "there").kind == "nfs4"
    assert facts.mount_of(Path("/")).kind == "ext4"


def test_the_screen_has_80_columns_and_the_worst_first(tmp_path: Path) -> None:
    slow = {"proc/self/mountinfo": MOUNTS.format("nfs4", "nas:/models")}
    files = {"proc/sys/vm/overcommit_memory": "2", **slow}
    lines = list(
        screen(examine(desktop(tmp_path, {**files, "proc/self/cgroup": None}, ram_bytes=GIB)))
    )
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line[0] != " "] == [
        *("wrong", "slow", "slow", "unknown", "fine", "does")
    ]
    assert any(line.strip() == "-> sudo sysctl vm.overcommit_memory=0" for line in lines)
