"""Control groups of this process: the memory it may take besides the machine's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["MemoryGroup", "memory_groups", "read_text"]

NO_LIMIT = 2**63


class MemoryGroup(NamedTuple):
    """The bytes that a group may take, and those it takes without pages of files, which the system
    reclaims first.
    """

    limit: int
    used: int


def memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """Return the groups of this process and all around them, of versions 1 and 2, by the files
    below ``root``.
    """
    lines = read_text(root / "proc/self/cgroup").splitlines() or ["0::/"]
    directories = (
        (each, kind) for line in lines for each, kind in _directories(root / "sys/fs/cgroup", line)
    )
    return [group for each, kind in directories if (group := _read(each, kind)) is not None]


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


def _directories(groups: Path, line: str) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Yield the directories of a line of /proc/self/cgroup, with the names of limit and use in
    them.
    """
    number, controllers, path = (*line.split(":", 2), "", "")[:3]
    if number == "0" and not controllers:
        places = [groups, groups / "unified"]
        names = V2
    elif "memory" in controllers.split(","):
        places = [groups / "memory"]
        names = V1
    else:
        return
    group = Path(path.strip("/") if ".." not in path else "")
    for parent in places:
        for ancestor in (group, *group.parents):
            yield parent / ancestor, names


def _read(directory: Path, names: tuple[str, str]) -> MemoryGroup | None:
    limit, used = (read_text(directory / name) for name in names)
    if not limit:
        return None
    pairs = (line.split() for line in read_text(directory / "memory.stat").splitlines())
    files = sum(int(pair[1]) for pair in pairs if pair[0] in ("active_file", "inactive_file"))
    return MemoryGroup(int(limit) if limit.isdigit() else NO_LIMIT, max(int(used or 0) - files, 0))


def read_text(path: Path) -> str:
    """Return the text of a small file without blanks around it; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
