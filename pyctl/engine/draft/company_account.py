"""The account of drafts from texts while several replies are decoded, by measured steps.

A draft of a text lengthens the step of all replies, and is of use to one. The expected gain has
many estimates in it then: of the text, of the draft model in its place, of wider and of second
evaluations. So the account compares tokens and milliseconds. Steps without texts give the speed of
the draft model alone, or of plain steps; each step with a text, and each that evaluates its
accepted tokens again, is entered as

    gain = tokens * ms per token without texts - ms

in units of a step without texts.
"""

from __future__ import annotations

from collections import defaultdict

__all__ = ["CompanyAccount"]

DECAY = 0.05
"""Weight of the latest step in the mean of those without texts."""

CREDIT = 2.0
"""Steps that texts may lose before any have gained."""

INTEREST = 0.001
"""Steps by which the account grows with each step: the share of time that texts may lose."""

MAX_BALANCE = 48.0
"""Steps that texts may lose at most after gains, as when a copied text ends. Four replies that copy
at once need as many: a draft of 128 tokens takes 9 to 12 in a second evaluation."""


class _Speed:
    """The mean milliseconds and tokens of a step without texts."""

    def __init__(self) -> None:
        self.n_steps = 0
        self.ms = 0.0
        self.n_tokens = 0.0

    def add(self, n_tokens: int, ms: float) -> None:
        """Add a step to the means."""
        self.n_steps += 1
        weight = max(1 / self.n_steps, DECAY)
        self.ms += weight * (ms - self.ms)
        self.n_tokens += weight * (n_tokens - self.n_tokens)


class CompanyAccount:
    """The account of texts, with one ``balance`` in steps for all numbers of replies."""

    def __init__(self) -> None:
        """Open the account with `CREDIT`, and without a measured speed."""
        self.balance = CREDIT
        self._reserved = 0.0  # steps that texts of this step may take
        # By number of replies: of all steps without texts, and of those without any drafts.
        self._speeds: defaultdict[int, _Speed] = defaultdict(_Speed)
        self._plain_speeds: defaultdict[int, _Speed] = defaultdict(_Speed)

    @property
    def limit(self) -> float:
        """The steps that a further draft of a text may cost in this step."""
        return max(self.balance - self._reserved, 0.0)

    def take(self, n_steps: float) -> None:
        """Reduce the limit of this step by ``n_steps``, a number of plain steps."""
        self._reserved += n_steps

    def end_step(self) -> None:
        """Release the reserved steps."""
        self._reserved = 0.0

    def record(
        self, n_seqs: int, n_tokens: int, ms: float, *, has_text: bool, is_plain: bool = False
    ) -> None:
        """Enter a step of ``n_seqs`` replies that took ``ms``, its drafts included, and gave
        ``n_tokens`` of all of them. ``is_plain``: it had no drafts.
        """
        gained = INTEREST
        if not has_text:
            self._speeds[n_seqs].add(n_tokens, ms)
            if is_plain:
                self._plain_speeds[n_seqs].add(n_tokens, ms)
        else:
            speed = self._best_speed(n_seqs)
            if speed is None:  # nothing to compare with
                gained -= 1
            else:
                gained += n_tokens / speed.n_tokens - ms / speed.ms
        self.balance = min(self.balance + gained, MAX_BALANCE)

    def _best_speed(self, n_seqs: int) -> _Speed | None:
        """Return the speed without texts: of all steps, or of plain ones if these alone are
        faster; None if there are none.
        """
        measured = [
            speeds[n_seqs]
            for speeds in (self._speeds, self._plain_speeds)
            if speeds[n_seqs].n_steps
        ]
        return min(measured, key=lambda speed: speed.ms / speed.n_tokens, default=None)
