"""The share of prompts that go on at the end of a conversation, as the clients of a cache do."""

from __future__ import annotations

__all__ = ["Continuations"]

PRIOR_PROMPTS = 100
"""Prompts for which the share that is expected at the start counts."""

MAX_PROMPTS = 4_000
"""Prompts that count at most: beyond, all earlier ones count half, so that a change of clients
shows within a day of work.
"""


class Continuations:
    """The counts of prompts that went on at the end of a conversation, and of those that left it
    before, after an edit.

    Agents go on at the end: of the prompts in recorded sessions that follow another one beyond its
    opening, 99.6 % (bench.traces). People who undo or edit messages do not.
    """

    def __init__(self) -> None:
        self._n_prompts = 0.0
        self._n_at_end = 0.0

    def record(self, *, is_at_end: bool) -> None:
        """Count a prompt that follows a conversation: at its end, or before it."""
        if self._n_prompts >= MAX_PROMPTS:
            self._n_prompts /= 2
            self._n_at_end /= 2
        self._n_prompts += 1
        self._n_at_end += is_at_end

    def share(self, expected: float) -> float:
        """Return the share of prompts at the end of a conversation; ``expected`` is the one at the
        start, which counts for PRIOR_PROMPTS prompts.
        """
        n_at_end = expected * PRIOR_PROMPTS + self._n_at_end
        return n_at_end / (PRIOR_PROMPTS + self._n_prompts)
