"""The widths of the latest steps. On a GPU a new width requires a new CUDA graph, and so its first
steps take longer.
"""

from __future__ import annotations

from enum import Enum, auto

from pyctl.engine.draft.expected_gain import StepWidth

__all__ = ["StepWidths", "WidthChange"]

GRAPH_SHARES = (0.25, 1.0)
"""Shares of the time of a CUDA graph that the first and the second step of a width take."""


class WidthChange(Enum):
    """The reason for a step of another width than the one before."""

    REPLIES = auto()
    """A reply began or ended."""
    TEXTS = auto()
    """This step or the one before has drafts of texts."""
    MODEL = auto()
    """The draft model drafts another number of tokens, or pauses."""


class StepWidths:
    """The width of the last step, and its latest change.

    Attributes:
        last: The width of the last step.
        changed_by: The reason for the latest change.
    """

    def __init__(self) -> None:
        """Start before the first step."""
        self.last = StepWidth(0, 0)
        self.changed_by = WidthChange.REPLIES
        self._n_before = 0  # steps of that width before the last one
        self._had_text = False

    @property
    def graph_share(self) -> float:
        """The share of the time of a CUDA graph that the last step took."""
        if self._n_before < len(GRAPH_SHARES):
            return GRAPH_SHARES[self._n_before]
        return 0.0

    def add(self, width: StepWidth, *, has_text: bool) -> None:
        """Add a step of ``width``; ``has_text``: some of its drafts are copied from a text."""
        if width == self.last:
            self._n_before += 1
        else:
            self._n_before = 0
            self.changed_by = self._reason(width, has_text=has_text)
        self.last = width
        self._had_text = has_text

    def _reason(self, width: StepWidth, *, has_text: bool) -> WidthChange:
        if width.n_seqs != self.last.n_seqs:
            return WidthChange.REPLIES
        if has_text or self._had_text:
            return WidthChange.TEXTS
        return WidthChange.MODEL
