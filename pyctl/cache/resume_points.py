"""The positions where a saved sequence can be resumed without a bit of difference."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["ANYWHERE", "NOWHERE", "ResumePoints"]


class ResumePoints(msgspec.Struct, frozen=True):
    """Token counts at which a saved sequence comes back to the same bits: up to ``window``, then
    each ``step`` tokens.

    A ``step`` of 0 adds none.
    """

    window: int = 0
    step: int = 1

    def contains(self, n: int) -> bool:
        """Return whether a sequence of ``n`` tokens may be saved and resumed."""
        return n <= self.window or (self.step > 0 and (n - self.window) % self.step == 0)

    def filter(self, ends: Sequence[int]) -> list[int]:
        """Return the batch ``ends`` at which a sequence may be saved."""
        return [end for end in ends if self.contains(end)]

    def add_to(self, ends: list[int]) -> list[int]:
        """Return batch ``ends`` with an additional end at each resume point after the window, where
        a batch would seldom end by chance.
        """
        if self.step <= 1 or not ends:
            return ends
        return sorted({*ends, *range(self.window + self.step, ends[-1], self.step)})


ANYWHERE = ResumePoints()
NOWHERE = ResumePoints(0, 0)
