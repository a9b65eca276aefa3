"""The source ``prediction``: drafts from the text that a request predicts for its own reply.

A client that has a file edited can predict most of the reply: the file. Its tokens are indexed for
this request alone, and drafted from the first token on. Edits are learnt as in texts of `cache`.
Predictions never change a token, and no other request drafts from them.
"""

from __future__ import annotations

from pyctl.engine.draft.source import NO_MATCH, DraftJob, Match
from pyctl.engine.draft.token_index import TokenIndex
from pyctl.engine.draft.tracked_reply import TrackedReply
from pyctl.prompt import Tokens, as_tokens
from pyctl.settings.limit import limit

__all__ = ["LONGEST_PREDICTED", "PredictionDrafts"]

LONGEST_PREDICTED = limit(128, "tokens of a draft from a prediction", "cut", "request")
"""As many as of `cache`: both end at the first edit."""

N_ASSUMED = 16
"""Matching tokens that a prediction counts for at its place. Its client expects the text, so the
first draft need not wait for matches; a wrong prediction loses its share within a few drafts."""

FIRST_PLACE = 1
"""The place of the first token in an index."""

MIN_CAPACITY = 256
"""The smallest index, in tokens."""


class PredictionDrafts:
    """Copies drafts from predictions, each for its own request, between `predict` and `end`."""

    name = "prediction"

    def __init__(self, longest: int = LONGEST_PREDICTED) -> None:
        """Draft up to ``longest`` tokens at a time."""
        self.maximum = longest
        self._replies: dict[int, TrackedReply] = {}

    def __bool__(self) -> bool:
        """Return whether any request has a prediction."""
        return bool(self._replies)

    def predict(self, key: int, prediction: tuple[int, ...]) -> None:
        """Register request ``key`` with the tokens that its reply may consist of."""
        if not prediction:
            return
        index = TokenIndex(_capacity(len(prediction)))
        index.begin()
        index.add(as_tokens(prediction))
        self._replies[key] = TrackedReply(
            index, self.maximum, place=FIRST_PLACE, n_assumed=N_ASSUMED
        )

    # -- as a source
    # ----------------------------------------------------------------------------------

    def begin(self, key: int, prompt: Tokens) -> None:
        """Do nothing: `predict` registers the requests that have a prediction."""

    def match(self, job: DraftJob, draft: tuple[int, ...] = ()) -> Match:
        reply = self._replies.get(job.key)
        if reply is None:
            return NO_MATCH
        return reply.match(job, draft)

    def end(self, key: int) -> None:
        self._replies.pop(key, None)


def _capacity(n: int) -> int:
    """Return the capacity of an index of ``n`` tokens: a power of two, with room for the gaps
    around them.
    """
    return max(1 << (n + 2).bit_length(), MIN_CAPACITY)
