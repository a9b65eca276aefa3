"""The memory that a process may take: that of the machine, within the limits of its control
groups.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path

import pytest

from pyctl.machine.control_groups import memory_groups

devices = importlib.import_module(
    "pyctl.llama.library.devices"
)  # whose package has a function of this name

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of control groups of a process on a machine of 64 GiB, of which 50 are
    available.
    """
    memory = {"MemAvailable": 50 * GIB, "MemTotal": 64 * GIB}
    monkeypatch.setattr(devices, "meminfo", memory.get)
    monkeypatch.setattr(devices, "memory_groups", partial(memory_groups, tmp_path))
    name_group(tmp_path, "1:name=systemd:/x\n0::/user/pyctl.service\n")
    found = tmp_path / "sys" / "fs" / "cgroup"
    (found / "user" / "pyctl.service").mkdir(parents=True)
    return found


def name_group(root: Path, text: str) -> None:
    (root / "proc" / "self").mkdir(parents=True, exist_ok=True)
    (root / "proc" / "self" / "cgroup").write_text(text)


def limit(group: Path, maximum: str, used: int, files: int) -> None:
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(
        f"anon 5\nactive_file {files // 2}\ninactive_file {files // 2}\nshmem 7\n"
    )


def test_without_limits_the_machine_counts(groups: Path, tmp_path: Path) -> None:
    assert devices.host_available() == 50 * GIB
    assert devices.host_total() == 64 * GIB
    limit(groups / "user", "max", 3 * GIB, 0)
    (tmp_path / "proc" / "self" / "cgroup").unlink()
    assert devices.host_available() == 50 * GIB
    assert devices.host_total() == 64 * GIB


def test_the_least_of_all_limits_counts_but_not_file_pages(groups: Path) -> None:
    limit(groups / "user", str(20 * GIB), 9 * GIB, 4 * GIB)
    assert devices.host_available() == 15 * GIB
    assert devices.host_total() == 20 * GIB
    limit(groups / "user" / "pyctl.service", str(16 * GIB), 2 * GIB, GIB)
    assert devices.host_available() == 15 * GIB
    assert devices.host_total() == 16 * GIB
    limit(groups / "user", str(20 * GIB), 21 * GIB, 0)
    assert devices.host_available() == 0


def test_a_container_sees_its_own_group_at_the_root(groups: Path, tmp_path: Path) -> None:
    limit(groups, str(8 * GIB), GIB, 0)
    for own in ("0::/\n", "0::/../other\n"):
        name_group(tmp_path, own)
        assert devices.host_available() == 7 * GIB
        assert devices.host_total() == 8 * GIB


def test_groups_of_version_1_count_too(groups: Path, tmp_path: Path) -> None:
    name_group(tmp_path, "4:cpu,memory:/box\n0::/\n")
    box = groups / "memory" / "box"
    box.mkdir(parents=True)
    (box / "memory.limit_in_bytes").write_text(f"{10 * GIB}\n")
    (box / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    assert devices.host_available() == 7 * GIB
    assert devices.host_total() == 10 * GIB
