"""The names of everything in a cache directory: made here, parsed here, nowhere else."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass

__all__ = [
    "INDEX",
    "RECENT",
    "REPLIES",
    "TAG_BYTES",
    "WORDS",
    "SegmentName",
    "StateName",
    "check_fingerprint",
    "parse",
    "temp_name",
    "temp_pid",
]

INDEX = "index.sqlite3"
RECENT = "recent"
REPLIES = "replies"
WORDS = "words"
TAG_BYTES = 8

_FINGERPRINT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SEGMENT = re.compile(r"(0|[1-9]\d{0,9})-([1-9]\d{0,9})-([0-9a-f]{32})-([0-9a-f]{16})\.rows")
_STATE = re.compile(r"([1-9]\d{0,9})-([0-9a-f]{32})\.state")
_TEMP = re.compile(r"\.(\d{1,10})-[0-9a-f]{16}\.tmp")


@dataclass(frozen=True)
class SegmentName:
    """Positions [start, end), the digest of the tokens [0, end), and a tag over the rows, ends and parents.

    Two runs can compute other rows for equal tokens (decoded, not prefilled); the tag keeps them apart.
    """

    start: int
    end: int
    digest: bytes
    tag: bytes

    def __str__(self) -> str:
        return f"{self.start}-{self.end}-{self.digest.hex()}-{self.tag.hex()}.rows"


@dataclass(frozen=True)
class StateName:
    """The prefix at which a state can be resumed."""

    n: int
    digest: bytes

    def __str__(self) -> str:
        return f"{self.n}-{self.digest.hex()}.state"


def parse(file: str) -> SegmentName | StateName | None:
    """The name in ``file``; None for temp files and whatever else lies in the directory."""
    if found := _STATE.fullmatch(file):
        return StateName(int(found[1]), bytes.fromhex(found[2]))
    if (found := _SEGMENT.fullmatch(file)) and int(found[1]) < int(found[2]):
        return SegmentName(int(found[1]), int(found[2]), bytes.fromhex(found[3]), bytes.fromhex(found[4]))
    return None


def temp_name() -> str:
    """A new name for a file of this process that is being written."""
    return f".{os.getpid()}-{secrets.token_hex(8)}.tmp"


def temp_pid(file: str) -> int | None:
    """The process that made the temp file ``file``; None if it is none."""
    found = _TEMP.fullmatch(file)
    return int(found[1]) if found else None


def check_fingerprint(fingerprint: str) -> str:
    """``fingerprint`` if it can be a directory's name, else ValueError."""
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ValueError(f"a fingerprint is 1 to 128 letters, digits, '.', '_' or '-', not {fingerprint!r}")
    return fingerprint
