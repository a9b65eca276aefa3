"""The account of drafts from texts while several replies are decoded, by measured steps.

A draft of a text lengthens the step of all replies, and is of use to one. The expected gain has
many estimates in it then: of the text, of the draft model in its place, of wider and of second
evaluations. So the account compares tokens and milliseconds. Each step with a text, and each that
evaluates its accepted tokens again, is entered as

    gain = tokens * ms per token without texts - ms

in units of a plain step. Without texts a token takes as long as in plain steps, or as in steps of
the draft model alone if these are faster.
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
        self._speeds: defaultdict[int, _Speed] = defaultdict(_Speed)  # by number of replies

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
        self, n_seqs: int, n_tokens: int, ms: float, *, has_text: bool, plain_ms: float = 0.0
    ) -> None:
        """Enter a step of ``n_seqs`` replies that took ``ms``, its drafts included, and gave
        ``n_tokens`` of all of them. A plain step of as many takes ``plain_ms``, 0 if none is
        measured.
        """
        gained = INTEREST
        speed = self._speeds[n_seqs]
        if not has_text:
            speed.add(n_tokens, ms)
        elif not plain_ms:  # nothing to compare with
            gained -= 1
        else:
            ms_per_token = plain_ms / n_seqs
            if speed.n_steps:
                ms_per_token = min(ms_per_token, speed.ms / speed.n_tokens)
            gained += (n_tokens * ms_per_token - ms) / plain_ms
        self.balance = min(self.balance + gained, MAX_BALANCE)
