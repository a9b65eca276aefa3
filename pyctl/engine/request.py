"""A request as the engine sees it, and the events by which it answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple, TypeAlias

from pyctl.cache import DiskPolicy, RequestStats, Source
from pyctl.engine.pool import StreamCounts
from pyctl.engine.sampling import Sampling
from pyctl.engine.selection import Pins
from pyctl.engine.stream import ReasoningLimit
from pyctl.errors import EngineError, PyctlError
from pyctl.prompt import Prompt

__all__ = [
    "Done",
    "DraftCounts",
    "Event",
    "Failed",
    "Piece",
    "Progress",
    "Request",
    "StopType",
    "Timings",
    "as_client_error",
]

log = logging.getLogger(__name__)

StopType: TypeAlias = Literal["eos", "word", "limit"]


@dataclass(frozen=True)
class Request:
    """What to generate after ``prompt``.

    ``max_tokens`` -1 means until the context is full, 0 means prefill only. ``stop`` are strings that end the reply and
    are not part of it. ``n_probs`` asks for that many most likely tokens with each sampled one. ``disk_policy``
    replaces the server's for this prompt. ``seq`` asks for that sequence, -1 for any. Two more limits, 0 for none: a
    line with less than ``n_indent`` blanks at its start, and a line end later than ``max_ms`` after the first token.
    ``pins`` are tokens that the reply attends to whatever else is chosen, where it does not attend to all.
    ``control_texts`` are control tokens that belong to the reply's text, and as what; others leave no trace in it.
    A ``background`` request only has its prompt evaluated, up to the last batch end in it, while nothing else is to be
    done. With ``after`` no client asked for it: it is the beginning of what may follow the reply to that request.
    """

    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = -1
    stop: tuple[str, ...] = ()
    n_probs: int = 0
    cache_prompt: bool = True
    disk_policy: DiskPolicy | None = None
    return_progress: bool = False
    reasoning: ReasoningLimit | None = None
    seq: int = -1
    n_indent: int = 0
    max_ms: int = 0
    pins: Pins = ()
    control_texts: Mapping[int, bytes] = field(default_factory=dict)
    background: bool = False
    after: Request | None = field(default=None, repr=False, compare=False)


MOST_POSITIONS = 64
"""Places in a draft that are counted one by one."""


@dataclass(frozen=True)
class DraftCounts:
    """What became of drafts: of ``n_drafts`` with ``n_drafted`` tokens, ``n_accepted`` tokens are part of a reply.

    ``by_position`` counts the accepted tokens by their place in the draft.
    """

    n_drafts: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    by_position: tuple[int, ...] = ()

    @staticmethod
    def of(n_drafted: int, n_accepted: int) -> DraftCounts:
        """The counts of one draft, which has tokens."""
        places = (1,) * n_accepted + (0,) * (n_drafted - n_accepted)
        return DraftCounts(1, n_drafted, n_accepted, places[:MOST_POSITIONS])

    def __add__(self, other: DraftCounts) -> DraftCounts:
        places = tuple(a + b for a, b in zip_longest(self.by_position, other.by_position, fillvalue=0))
        n_drafts, n_drafted = self.n_drafts + other.n_drafts, self.n_drafted + other.n_drafted
        return DraftCounts(n_drafts, n_drafted, self.n_accepted + other.n_accepted, places)


@dataclass(frozen=True)
class Timings:
    """Counts in tokens, times in milliseconds; ``first_token_ms`` counts from submission.

    ``streamed`` is what attention has read from RAM and what it chose, None without a pool.
    """

    n_cached: int
    n_evaluated: int
    prompt_ms: float
    n_predicted: int
    predicted_ms: float
    first_token_ms: float
    drafts: DraftCounts = DraftCounts()
    streamed: StreamCounts | None = None


@dataclass(frozen=True)
class Progress:
    """Prefill has reached ``n_processed`` of ``n_prompt`` prompt tokens, ``n_cached`` of them restored from ``source``
    into sequence ``seq``.

    The first one comes right after the restore, before anything is evaluated.
    """

    n_prompt: int
    n_cached: int
    n_processed: int
    ms: float
    source: Source
    seq: int = 0


class Piece(NamedTuple):
    """Text that is final: never half a character, never part of a stop string.

    ``text`` may be empty when tokens ended within a character. ``tokens`` are the ids sampled since the last piece;
    ``probs`` holds, per token, (id, logprob) of the sampled token followed by the ``n_probs`` most likely ones;
    probabilities instead of their logarithms if they are those after sampling.
    """

    text: str
    tokens: tuple[int, ...]
    probs: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class Done:
    """The reply ended. ``seq`` is the sequence that served it; ``stopping_word`` is set for ``word`` only."""

    stop_type: StopType
    stopping_word: str
    timings: Timings
    stats: RequestStats
    seq: int


@dataclass(frozen=True)
class Failed:
    """The request ended without a reply; ``error`` says why."""

    error: Exception


def as_client_error(error: Exception) -> PyctlError:
    """The error for the client of a request that ``error`` ended; one that is not ours is logged."""
    if isinstance(error, PyctlError):
        return error
    log.error("unexpected error", exc_info=error)
    return EngineError(f"internal error: {str(error) or type(error).__name__}")


Event: TypeAlias = Progress | Piece | Done | Failed
