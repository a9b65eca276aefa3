"""What the cache did for one request, in tokens and milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pyctl.prompt import Tokens

__all__ = ["Miss", "Report", "Source", "Totals"]

CONTEXT = 12
"""Tokens shown on each side of a difference."""

Source: TypeAlias = Literal["none", "live", "ram", "disk"]
"""Where the restored prefix came from; ``live`` is the sequence inside llama.cpp."""


@dataclass(frozen=True)
class Miss:
    """Where the prompt leaves the nearest recent one, and what could be restored before that.

    ``position`` is the first token that differs, ``nearest`` the position that was resumed at instead (0 for none).
    ``known`` and ``given`` are the tokens around the difference, CONTEXT of them on each side at most, as the recent
    prompt had them and as this one does.
    """

    position: int
    nearest: int
    known: tuple[int, ...] = ()
    given: tuple[int, ...] = ()

    @classmethod
    def at(cls, position: int, nearest: int, known: Tokens, given: Tokens) -> Miss:
        """A miss with the tokens around ``position``."""
        around = slice(max(position - CONTEXT, 0), position + CONTEXT)
        return cls(position, nearest, tuple(known[around].tolist()), tuple(given[around].tolist()))


@dataclass
class Report:
    """One request's account. Counts are tokens, times are milliseconds.

    ``n_prompt == n_cached + n_evaluated`` once the prefill has ended; ``n_saved`` counts snapshots taken. ``save_ms``
    includes the wait for the batch that the device was still computing.
    """

    n_prompt: int
    source: Source = "none"
    n_cached: int = 0
    n_evaluated: int = 0
    n_saved: int = 0
    lookup_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    save_ms: float = 0.0
    miss: Miss | None = field(default=None)


@dataclass
class Totals:
    """Sums over all requests since the start; counts of tokens unless the name says otherwise."""

    requests: int = 0
    prompt: int = 0
    evaluated: int = 0
    predicted: int = 0
    cached: dict[Source, int] = field(default_factory=lambda: {"live": 0, "ram": 0, "disk": 0})
    hits: dict[Source, int] = field(default_factory=lambda: {"live": 0, "ram": 0, "disk": 0})
    snapshots_saved: int = 0
    failed_restores: int = 0

    def add(self, report: Report, n_predicted: int) -> None:
        """Count a finished request."""
        self.requests += 1
        self.prompt += report.n_prompt
        self.evaluated += report.n_evaluated
        self.predicted += n_predicted
        self.snapshots_saved += report.n_saved
        if report.source != "none":
            self.cached[report.source] += report.n_cached
            self.hits[report.source] += 1
