"""Requests to the engine, and the events of their replies."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.ports import CacheRequest
from pyctl.cache.snapshot import Source
from pyctl.chat.reasoning import ReasoningLimit
from pyctl.engine.backend import NO_SPAN, DraftSpan
from pyctl.engine.loop_detector import ReplyLoop
from pyctl.engine.sampling import Sampling
from pyctl.errors import EngineError, PyctlError

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
    "empty_reply",
]

log = logging.getLogger(__name__)

StopType: TypeAlias = Literal["eos", "word", "limit"]


@dataclass(frozen=True)
class Request(CacheRequest):
    """A request to generate after ``prompt``.

    ``max_tokens``: -1 until the context is full, 0 prefill only. ``stop`` strings end the reply,
    which excludes them. ``n_probs`` is the number of most likely tokens returned with each token
    and its log-probability, None for neither. ``seq`` is the required sequence, -1 for any. Two
    limits, 0 for none, also end the reply: a line with fewer than ``n_indent`` leading blanks, and
    the first line end more than ``max_ms`` after the first token. ``control_texts`` maps control
    tokens to their text in the reply; all others have none. Without ``may_read_prompts`` nothing is
    drafted from the texts of other clients, so that no count of its reply depends on a single token
    of theirs. ``prediction`` are the tokens that its client expects as the reply, to draft from;
    they change no token of it. A ``background`` request only evaluates its prompt, up to its last
    batch end, while no other work is due. With ``after`` it has no client: it is the expected
    beginning of the turn after that request. ``model_before`` is another model that the last
    request of this conversation went to, empty if there was none.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = -1
    stop: tuple[str, ...] = ()
    n_probs: int | None = None
    return_progress: bool = False
    reasoning: ReasoningLimit | None = None
    seq: int = -1
    n_indent: int = 0
    max_ms: int = 0
    control_texts: Mapping[int, bytes] = field(default_factory=dict)
    prediction: tuple[int, ...] = field(default=(), repr=False)
    model_before: str = ""

    @property
    def is_prefill_only(self) -> bool:
        """True if a client waits until its prompt is in the cache, and for no reply."""
        return self.max_tokens == 0 and not self.background


MAX_POSITIONS = 64
"""Draft positions with separate counts."""


@dataclass(frozen=True)
class DraftCounts:
    """Draft totals: ``n_drafts`` drafts with ``n_drafted`` tokens, of which replies accepted
    ``n_accepted``.

    ``by_position`` counts accepted tokens by their position in the draft. ``n_predicted`` of the
    drafted tokens came from predictions, ``n_predicted_accepted`` of the accepted ones.
    """

    n_drafts: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    by_position: tuple[int, ...] = ()
    n_predicted: int = 0
    n_predicted_accepted: int = 0

    @staticmethod
    def of_draft(n_drafted: int, n_accepted: int, predicted: DraftSpan = NO_SPAN) -> DraftCounts:
        """Return the counts of one nonempty draft, whose tokens in ``predicted`` come from a
        prediction.
        """
        places = (1,) * n_accepted + (0,) * (n_drafted - n_accepted)
        return DraftCounts(
            n_drafts=1,
            n_drafted=n_drafted,
            n_accepted=n_accepted,
            by_position=places[:MAX_POSITIONS],
            n_predicted=predicted.n_within(n_drafted),
            n_predicted_accepted=predicted.n_within(n_accepted),
        )

    def __add__(self, other: DraftCounts) -> DraftCounts:
        places = tuple(
            a + b for a, b in zip_longest(self.by_position, other.by_position, fillvalue=0)
        )
        return DraftCounts(
            n_drafts=self.n_drafts + other.n_drafts,
            n_drafted=self.n_drafted + other.n_drafted,
            n_accepted=self.n_accepted + other.n_accepted,
            by_position=places,
            n_predicted=self.n_predicted + other.n_predicted,
            n_predicted_accepted=self.n_predicted_accepted + other.n_predicted_accepted,
        )


@dataclass(frozen=True)
class Timings:
    """Counts in tokens, times in milliseconds; ``first_token_ms`` counts from submission,
    ``queued_ms`` from submission to the start. ``loop`` is the loop of the reply, None without one.
    """

    n_cached: int
    n_evaluated: int
    prompt_ms: float
    n_predicted: int
    predicted_ms: float
    first_token_ms: float
    drafts: DraftCounts = DraftCounts()
    queued_ms: float = 0.0
    loop: ReplyLoop | None = None


@dataclass(frozen=True)
class Progress:
    """Prefill progress: ``n_processed`` of ``n_prompt`` tokens, ``n_cached`` of them restored from
    ``source``.

    ``seconds_left`` is an estimate for the rest, 0 if unknown. ``queue_position`` is the place of a
    request that waits, 1 for the next one; 0 for one that runs, whose first event follows the
    restore, before any evaluation.
    """

    n_prompt: int
    n_cached: int
    n_processed: int
    ms: float
    source: Source
    seq: int = 0
    seconds_left: float = 0.0
    queue_position: int = 0


class Piece(NamedTuple):
    """Final text: never half a character, never part of a stop string.

    ``text`` may be empty if the tokens end within a character. ``tokens`` are the ids sampled since
    the last piece. ``probs`` holds for each token that the text starts (id, logprob) of the sampled
    token, then of the ``n_probs`` most likely ones; with ``post_sampling_probs``, probabilities
    instead of logarithms.
    """

    text: str
    tokens: tuple[int, ...]
    probs: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class Done:
    """The reply ended. ``seq`` is the sequence that served it; ``stopping_word`` is set for
    ``word`` only. ``receipt`` is the id of its receipt, 0 for none.
    """

    stop_type: StopType
    stopping_word: str
    timings: Timings
    stats: RequestStats
    seq: int
    receipt: int = 0


class Failed(msgspec.Struct, frozen=True):
    """The request ended with ``error``."""

    error: Exception


def as_client_error(error: Exception) -> PyctlError:
    """Return the error to report to the client. Logs unexpected errors and wraps them in
    EngineError.
    """
    if isinstance(error, PyctlError):
        return error
    log.error("unexpected error", exc_info=error)
    return EngineError(f"internal error: {str(error) or type(error).__name__}")


Event: TypeAlias = Progress | Piece | Done | Failed


def empty_reply(request: Request) -> Done:
    """Return the reply to an empty prompt."""
    timings = Timings(0, 0, 0.0, 0, 0.0, 0.0)
    return Done("limit", "", timings, RequestStats(0), max(request.seq, 0))
