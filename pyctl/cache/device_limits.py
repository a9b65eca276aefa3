"""Limits of the rows that leave the device: the size of a segment, and the bytes that may wait for
the disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyctl.settings.limit import limit

__all__ = ["MAX_UNWRITTEN_BYTES", "DeviceLimits"]

PIECE_BYTES = limit(
    2**28,
    "rows copied from the device in one segment",
    "longer segments are split",
    "memory",
    "bytes",
)

MAX_UNWRITTEN_BYTES = limit(
    2**29,
    "evicted snapshots that wait to be written",
    "the least valuable are dropped",
    "memory",
    "bytes",
)

UNWRITTEN_PART = 2
"""Rows of the device that wait to be written may take RAM on top of the cache: its budget over
this.
"""


@dataclass(frozen=True)
class DeviceLimits:
    """Limits of the rows that leave the device.

    Attributes:
        piece_bytes: The maximum bytes of a segment.
        unwritten_bytes: The bytes that may wait for the disk, on top of a cache of any budget.
        unwritten_part: A cache of a large budget lets its budget over this wait.
    """

    piece_bytes: int = PIECE_BYTES
    unwritten_bytes: int = MAX_UNWRITTEN_BYTES
    unwritten_part: int = UNWRITTEN_PART

    def max_unwritten(self, budget: int | None) -> int:
        """Return the maximum of bytes that may wait for the disk, on top of a cache of ``budget``
        bytes.
        """
        return max(self.unwritten_bytes, (budget or 0) // self.unwritten_part)
