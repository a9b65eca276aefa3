"""Origins of drafts, and the share of their tokens that replies accept."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["AcceptedShare", "Origin"]

PRIOR = 0.8
"""Share of right tokens of a model before any are counted."""

PRIOR_WEIGHT = 3.0
"""Weight of the prior, in tokens."""

HIGHEST_SHARE = 0.999
"""Highest share that is estimated: the expected tokens of a draft divide by its distance from 1."""

MATCH_CLASSES = (1, 4, 16, 64)
"""Numbers of matching tokens from which on shares are counted apart."""


class Origin(NamedTuple):
    """The origin of drafts: a model, or the place of a text where ``matched`` tokens agree.

    ``matched`` is one of `MATCH_CLASSES`, 0 for a model. With ``is_before`` the origin stands for
    the drafts that ``source`` continues there.
    """

    source: str
    matched: int = 0
    is_before: bool = False

    @classmethod
    def from_match(cls, source: str, n_matched: int) -> Origin:
        """Return the origin of drafts after ``n_matched`` tokens."""
        return cls(source, max((n for n in MATCH_CLASSES if n <= n_matched), default=0))

    @property
    def is_text(self) -> bool:
        """True if the drafts are copied from a text, False if a model makes them."""
        return self.matched > 0

    @property
    def prior(self) -> float:
        """The share of right tokens before any is counted: after n matching tokens of a text, one
        of n + 1 is wrong.
        """
        return self.matched / (1 + self.matched) if self.matched else PRIOR

    def counted(self, n: int) -> int:
        """Return how many of ``n`` drafts are evidence: after as many right ones, more tokens would
        have matched.
        """
        return min(n, self.matched) if self.matched else n


class AcceptedShare:
    """The moving share of right tokens; each further draft reduces older evidence by ``decay``."""

    def __init__(self, decay: float) -> None:
        self._keep = 1 - decay
        self._n_tried = 0.0
        self._n_right = 0.0

    def add(self, n_drafted: int, n_accepted: int) -> None:
        """Count a draft: its accepted tokens and the first wrong one were tried."""
        n_tried = min(n_accepted + 1, n_drafted)
        self._n_tried = self._n_tried * self._keep + n_tried
        self._n_right = self._n_right * self._keep + n_accepted

    def weaken(self) -> None:
        """Reduce the evidence to the prior's weight, so that the next drafts decide."""
        scale = PRIOR_WEIGHT / max(self._n_tried, PRIOR_WEIGHT)
        self._n_tried *= scale
        self._n_right *= scale

    def estimate(self, prior: float, doubt: float = 0.0) -> float:
        """Return the estimated share, with ``prior`` counted in.

        A lower one than ``prior`` is raised by up to ``doubt`` standard deviations, at most to
        ``prior``.
        """
        n = self._n_tried + PRIOR_WEIGHT
        mean = (self._n_right + PRIOR_WEIGHT * prior) / n
        raised = mean + doubt * math.sqrt(mean * (1 - mean) / n)
        return min(max(mean, min(raised, prior)), HIGHEST_SHARE)
