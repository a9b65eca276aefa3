"""The heads of pages of results: the facts of a measurement, and how old it is."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

__all__ = ["HASH", "HEAD", "MAX_AGE", "age", "continued", "count_engine_commits", "head"]

ROOT = Path(__file__).resolve().parents[1]

HEAD = ("commit", "date", "machine", "command", "weights")
HASH = re.compile(r"\b[0-9a-f]{7,40}\b")

ENGINE = ("pyctl/engine", "pyctl/cache", "pyctl/disk", "pyctl/llama/draft", "csrc")
"""Paths of the code that chooses batch ends, takes snapshots and drafts."""

MAX_AGE = 200
"""Engine commits after which a table is too old to be shown."""

RENAMES = ": name "
"""Subjects of commits that rename, and so change no figure."""


def head(source: Path) -> dict[str, str]:
    """Return commit, date, machine, command and weights of a page of results; ValueError if it
    lacks one.
    """
    text = source.read_text(encoding="utf-8")
    lines = re.findall(r"^- (\w+): (.+)$", text.partition("\n|")[0], re.MULTILINE)
    found = json.loads(text)["machine"] if source.suffix == ".json" else dict(lines)
    missing = [
        name
        for name in HEAD
        if not found.get(name) or (name == "commit" and not HASH.search(found[name]))
    ]
    if missing:
        raise ValueError(
            f"{source.name} lacks its {', '.join(missing)}: write '- {missing[0]}: ...' at its top"
        )
    return {name: found[name] for name in HEAD}


def continued(old: dict[str, str], new: dict[str, str]) -> dict[str, str] | None:
    """Return the head of a page that another command adds to; None if its commit, machine or
    weights are others.
    """
    if any(old.get(name) != new[name] for name in ("commit", "machine", "weights")):
        return None
    commands = dict.fromkeys([*old["command"].split(", "), new["command"]])
    return {**new, "command": ", ".join(commands)}


def age(commit: str, root: Path = ROOT) -> str:
    """Return the number of commits newer than ``commit``, in words, and how many of them changed
    batch ends, snapshots or drafts, marked beyond `MAX_AGE`.
    """
    n = _count(root, f"{commit}..HEAD")
    n_engine = count_engine_commits(commit, root)
    if n is None or n_engine is None:
        return "of unknown age"
    mark = ": OLD" if n_engine > MAX_AGE else ""
    return f"{n:,} commits old, {n_engine:,} of them in the engine{mark}"


def count_engine_commits(commit: str, root: Path = ROOT) -> int | None:
    """Return the number of commits newer than ``commit`` that changed batch ends, snapshots or
    drafts; None without git, or if this copy lacks the history.
    """
    return _count(root, "--invert-grep", f"--grep={RENAMES}", f"{commit}..HEAD", "--", *ENGINE)


def _count(root: Path, *arguments: str) -> int | None:
    """Return the number of commits that `git rev-list` counts; None without git, or if this copy
    lacks the history.
    """
    command = ("git", "rev-list", "--count", *arguments)
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return int(done.stdout) if done.returncode == 0 else None
