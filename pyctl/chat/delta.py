"""What a piece of a reply adds to each of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["CallDelta", "Delta"]


@dataclass(frozen=True)
class CallDelta:
    """More of tool call number ``index`` of a reply; the first of each has its ``id`` and ``name``, no other has.

    ``arguments`` is JSON text to append.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(NamedTuple):
    """Text to append to each part of a reply, and more of its tool calls."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()
