"""The block of `pyctl bench --share`: the figures of a run that docs/cards.md takes."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyctl.measure.bench_run import Record

__all__ = ["SHARED", "block_lines", "commit_of", "model_facts", "public_flags", "shared_records"]

SHARED = frozenset(
    {
        *("server", "kind", "way", "depth", "mode", "what", "source"),
        *("cached", "evaluated", "tokens", "drafted", "accepted"),
        *("first_ms", "rate", "difference", "ram_mib", "vram_mib"),
    }
)
"""Fields of records that are shared: numbers, and names of rows. Texts of errors may have paths."""

CHUNK = 1 << 22
SECONDS = 10.0


def model_facts(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the name of the first file, and the bytes and SHA-256 of all files one after the
    other. OSError if one cannot be read.
    """
    files = list(paths)
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    size = sum(path.stat().st_size for path in files)
    return {"file": files[0].name, "bytes": size, "sha256": digest.hexdigest()}


def public_flags(flags: Sequence[str]) -> list[str]:
    """Return the flags without the directories of files, which may contain a user's name."""
    return [Path(word).name if "/" in word else word for word in flags]


def shared_records(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the measured records, with the fields of `SHARED` alone."""
    measured = (record for record in records if record["kind"] not in ("failed", "skipped"))
    return [
        {name: value for name, value in record.items() if name in SHARED} for record in measured
    ]


def commit_of(directory: Path) -> str:
    """Return the commit of the checkout that contains ``directory``, "" for an installation.

    A change that is not committed adds "-dirty".
    """
    command = ("git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=8")
    try:
        done = subprocess.run(
            (*command, "--exclude=*"), capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def block_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the lines to paste: a fenced JSON object, a record on each line."""
    head = {name: value for name, value in report.items() if name != "records"}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    records = [f"  {json.dumps(record)}" for record in report["records"]]
    body = ["{", *lines, ' "records": [', ",\n".join(records), " ]}"]
    return ["```json", *filter(None, body), "```"]
