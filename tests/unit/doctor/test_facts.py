"""Facts about the machine below a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyctl.doctor.facts import Facts, existing
from pyctl.doctor.finding import UnknownError
from tests.unit.doctor.machines import QUIET, desktop


def test_the_nearest_mount_counts(tmp_path: Path) -> None:
    text = f"{QUIET['proc/self/mountinfo']}23 22 0:40 / {tmp_path} rw - nfs4 nas:/x rw\n"
    facts = desktop(tmp_path, {"proc/self/mountinfo": text})
    assert facts.mount_of(tmp_path / "not" / "there").kind == "nfs4"
    assert facts.mount_of(Path("/")).kind == "ext4"


def test_the_last_of_two_mounts_at_one_place_is_on_top(tmp_path: Path) -> None:
    text = "1 1 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / / rw - xfs /dev/b rw\n"
    facts = desktop(tmp_path, {"proc/self/mountinfo": text})
    assert facts.mount_of(Path("/")).source == "/dev/b"


def test_a_mount_point_may_have_blanks_and_odd_lines_are_passed_over(tmp_path: Path) -> None:
    place = tmp_path / "two words"
    place.mkdir()
    escaped = str(place).replace(" ", "\\040")
    text = f"odd\n1 1 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / {escaped} rw - nfs nas:/x rw\n"
    facts = desktop(tmp_path, {"proc/self/mountinfo": text})
    assert facts.mount_of(place).kind == "nfs"


def test_a_place_without_a_mount_is_unknown(tmp_path: Path) -> None:
    facts = desktop(tmp_path, {"proc/self/mountinfo": "odd\n"})
    with pytest.raises(UnknownError, match="does not name the file system of /"):
        facts.mount_of(Path("/"))


def test_a_number_is_read_or_unknown(tmp_path: Path) -> None:
    facts = desktop(tmp_path, {"negative": "-1\n", "word": "many\n"})
    assert facts.number("negative") == -1
    with pytest.raises(UnknownError, match="/word is not a number"):
        facts.number("word")
    with pytest.raises(UnknownError, match="/missing: No such file"):
        facts.number("missing")


@pytest.mark.parametrize("name", [".dockerenv", "run/.containerenv"])
def test_docker_and_podman_leave_a_file(name: str, tmp_path: Path) -> None:
    assert not desktop(tmp_path).is_container
    assert desktop(tmp_path, {name: ""}).is_container


def test_windows_names_itself_in_the_release_of_the_kernel(tmp_path: Path) -> None:
    release = {"proc/sys/kernel/osrelease": "6.6.87-Microsoft-standard-WSL2\n"}
    assert not desktop(tmp_path).is_wsl
    assert desktop(tmp_path, release).is_wsl


def test_the_driver_is_asked_once(tmp_path: Path) -> None:
    calls: list[int] = []
    find: Any = lambda: calls.append(1)  # noqa: E731
    facts = Facts(tmp_path, find_driver=find)
    assert facts.driver is None
    assert facts.driver is None
    assert calls == [1]


def test_the_nearest_existing_directory_of_a_path(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert existing(tmp_path / "link" / "not" / "there") == tmp_path / "real"
