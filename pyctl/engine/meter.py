"""What the engine has evaluated since the start, for those who watch it."""

from __future__ import annotations

from dataclasses import dataclass

from pyctl.engine.request import Timings

__all__ = ["Meter"]


@dataclass
class Meter:
    """Sums since the start; ``n_*`` are tokens except for the calls of llama_decode, times are milliseconds.

    ``n_busy`` adds up the sequences of each call, ``n_longest`` is the longest sequence seen. What a request evaluates
    and predicts counts when it is served; requests that were cancelled count as calls only.
    """

    n_calls: int = 0
    n_busy: int = 0
    n_longest: int = 0
    n_cached: int = 0
    n_prompt: int = 0
    prompt_ms: float = 0.0
    n_predicted: int = 0
    predicted_ms: float = 0.0

    def evaluated(self, n_seqs: int, length: int) -> None:
        """One call for ``n_seqs`` sequences, the longest of which has ``length`` tokens now."""
        self.n_calls += 1
        self.n_busy += n_seqs
        self.n_longest = max(self.n_longest, length)

    def served(self, timings: Timings) -> None:
        """A request ended with a reply."""
        self.n_cached += timings.cache_n
        self.n_prompt += timings.prompt_n
        self.prompt_ms += timings.prompt_ms
        self.n_predicted += timings.predicted_n
        self.predicted_ms += timings.predicted_ms
