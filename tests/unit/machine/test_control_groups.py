"""The memory that control groups leave to this process, from made-up files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyctl.machine.control_groups import NO_LIMIT, MemoryGroup, memory_groups, read_text


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_group_of_version_2_and_all_around_it_count(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/user.slice/app\n",
        "sys/fs/cgroup/user.slice/app/memory.max": "1000\n",
        "sys/fs/cgroup/user.slice/app/memory.current": "600\n",
        "sys/fs/cgroup/user.slice/memory.max": "max\n",
        "sys/fs/cgroup/user.slice/memory.current": "700\n",
    }
    assert memory_groups(write(tmp_path, files)) == [
        MemoryGroup(1000, 600),
        MemoryGroup(NO_LIMIT, 700),
    ]


def test_pages_of_files_are_not_in_use(tmp_path: Path) -> None:
    """The system takes them back before it refuses memory."""
    files = {
        "sys/fs/cgroup/memory.max": "1000",
        "sys/fs/cgroup/memory.current": "600",
        "sys/fs/cgroup/memory.stat": "anon 300\nactive_file 100\ninactive_file 150\n",
    }
    assert memory_groups(write(tmp_path, files)) == [MemoryGroup(1000, 350)]


def test_more_pages_of_files_than_use_are_no_negative_use(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory.max": "1000",
        "sys/fs/cgroup/memory.current": "100",
        "sys/fs/cgroup/memory.stat": "active_file 150\n",
    }
    assert memory_groups(write(tmp_path, files)) == [MemoryGroup(1000, 0)]


def test_a_group_of_version_1_has_other_names(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu:/elsewhere\n4:cpuset,memory:/docker/x\n",
        "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "2000",
        "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": "50",
        "sys/fs/cgroup/memory/docker/x/memory.max": "7",
    }
    assert memory_groups(write(tmp_path, files)) == [MemoryGroup(2000, 50)]


@pytest.mark.parametrize("line", ["0::/../../etc", "4:memory:/a/../../b"])
def test_a_path_that_leads_outside_is_that_of_the_root_group(line: str, tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": f"{line}\n",
        "etc/memory.max": "1",
        "sys/fs/cgroup/memory.max": "3000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000",
    }
    assert memory_groups(write(tmp_path, files)) == [MemoryGroup(3000, 0)]


def test_a_machine_without_groups_has_none(tmp_path: Path) -> None:
    assert memory_groups(tmp_path) == []


def test_a_file_that_cannot_be_read_is_empty(tmp_path: Path) -> None:
    assert read_text(tmp_path) == ""
    assert read_text(write(tmp_path, {"a": " text\n"}) / "a") == "text"
