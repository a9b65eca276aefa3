"""The finding of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Level", "UnknownError", "slow", "wrong"]

Level = Literal["wrong", "slow", "unknown"]
"""``wrong`` does not work or may lose data; ``slow`` costs time; ``unknown`` is a check that could
not be made.
"""


@dataclass(frozen=True)
class Finding:
    """A sentence about this machine, and ``fix``: a command or a sentence that changes it."""

    level: Level
    text: str
    fix: str = ""
    check: str = ""


class UnknownError(Exception):
    """A check cannot be made; the message is the reason."""


def wrong(text: str, fix: str) -> Finding:
    """Return a finding of something that does not work."""
    return Finding("wrong", text, fix)


def slow(text: str, fix: str) -> Finding:
    """Return a finding of something that costs time."""
    return Finding("slow", text, fix)
