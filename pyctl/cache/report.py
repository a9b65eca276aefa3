"""What the cache did for one request, in tokens and milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["Miss", "Report", "Source"]

Source: TypeAlias = Literal["none", "live", "ram", "disk"]
"""Where the restored prefix came from; ``live`` is the sequence inside llama.cpp."""


@dataclass(frozen=True)
class Miss:
    """Why more of the prompt was not restored.

    ``position`` is the first token that differs from the nearest known prompt, ``nearest`` the deepest
    position that some snapshot could have resumed at (0 when there is none).
    """

    position: int
    nearest: int


@dataclass
class Report:
    """One request's account. Counts are tokens, times are milliseconds.

    ``n_prompt == n_cached + n_evaluated`` once the prefill has ended; ``n_saved`` counts snapshots taken.
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
