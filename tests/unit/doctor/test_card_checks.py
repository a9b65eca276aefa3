"""Checks of cards, the driver and the build: each reports its problem with a fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyctl.doctor.examine import examine
from pyctl.machine.libraries import unused_card
from pyctl.machine.probe import Driver
from tests.unit.doctor.machines import PCI_CARD, RTX_3090, card_state, desktop
from tests.unit.doctor.problem import Problem


def broken(code: int) -> Callable[[], Driver]:
    return lambda: Driver((13, 0), "580.95.05", error=code)


def states(**changes: Any) -> Callable[[], Any]:
    return lambda: (card_state(**changes),)


def idle_card() -> str:
    return unused_card(
        {"XDG_DATA_HOME": "/nowhere"}, lambda: Driver((13, 0), "580", (RTX_3090,)), lambda: ()
    )


PROBLEMS = (
    pytest.param(
        Problem(
            "driver",
            "no driver",
            "apt install nvidia-driver-580",
            facts={"find_driver": lambda: None},
        ),
        id="no driver",
    ),
    pytest.param(
        Problem(
            "driver",
            "no driver",
            "--gpus all",
            files={".dockerenv": ""},
            facts={"find_driver": lambda: None},
        ),
        id="no driver in a container",
    ),
    pytest.param(
        Problem(
            "driver",
            "kernel module differ",
            "restart the machine",
            facts={"find_driver": broken(803)},
        ),
        id="old kernel module",
    ),
    pytest.param(
        Problem(
            "driver", "fails to start", "nvidia-modprobe -u", facts={"find_driver": broken(999)}
        ),
        id="no device file",
    ),
    pytest.param(
        Problem("driver", "cuInit 7", "nvidia-smi", facts={"find_driver": broken(7)}),
        id="another code",
    ),
    pytest.param(
        Problem(
            "driver",
            "driver 550.54 speaks CUDA 12.4, this build needs CUDA 13",
            "580",
            facts={"find_driver": lambda: Driver((12, 4), "550.54", (RTX_3090,))},
        ),
        id="old driver",
    ),
    pytest.param(
        Problem(
            "build", "RTX 3090 is idle", "pyctl setup", facts={"gpus": list, "idle_card": idle_card}
        ),
        id="CPU build",
    ),
    pytest.param(
        Problem(
            "llama.cpp",
            "0.6 is loaded",
            "reinstall",
            facts={"error": ("built for 0.5, 0.6 is loaded")},
        ),
        id="other release",
    ),
    pytest.param(
        Problem(
            "pinned memory",
            "cannot be pinned: code 2",
            "driver",
            facts={"pin_error": lambda: "code 2"},
        ),
        id="pageable",
    ),
    pytest.param(
        Problem(
            "PCIe link", "4 of 16 PCIe lanes", "slot", facts={"card_states": states(lanes=(4, 16))}
        ),
        id="few lanes",
    ),
    pytest.param(
        Problem(
            "PCIe link",
            "card take 2 times",
            "slot",
            facts={"card_states": states(generations=(3, 4))},
        ),
        id="old slot",
    ),
)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_check_finds_its_problem(problem: Problem, tmp_path: Path) -> None:
    problem.check_finding(tmp_path)


def test_a_machine_without_a_card_has_no_findings_of_cards(tmp_path: Path) -> None:
    found = examine(desktop(tmp_path, dict.fromkeys(PCI_CARD), gpus=list, cuda=lambda: 0))
    assert found.findings == ()
    assert {"driver", "build", "pinned memory", "PCIe link"} <= set(found.absent)
