"""Why a snapshot was not checked."""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["SkipReason", "SkippedError"]

SkipReason: TypeAlias = Literal[
    "not_exact", "image", "too_long", "no_room", "gone", "unreadable", "unstable", "failed"
]
"""The reasons:

- ``not_exact``: a cold run may have other bits: the server runs without --exact, or batches differ
- ``image``: the end has tokens of an image, whose pixels are not kept
- ``too_long``: the nearest position to resume at is too far away
- ``no_room``: the context or RAM has no room that costs no conversation
- ``gone``: it was evicted meanwhile
- ``unreadable``: the disk refuses
- ``unstable``: two evaluations or two restores have different bits
- ``failed``: an error, which the log has
"""


class SkippedError(Exception):
    """A snapshot is not checked, for ``reason``."""

    def __init__(self, reason: SkipReason) -> None:
        super().__init__(reason)
        self.reason: SkipReason = reason
