"""A reply that is compared, token by token, with the texts that its drafts are copied from."""

from __future__ import annotations

from itertools import islice

from pyctl.engine.draft.alignment import Alignment
from pyctl.engine.draft.source import NO_MATCH, DraftJob, Match
from pyctl.engine.draft.token_index import CONTEXT, TokenIndex

__all__ = ["TrackedReply"]


class TrackedReply:
    """A reply and its place in the texts of ``index``; drafts have up to ``maximum`` tokens.

    ``place`` is where the reply is expected to start, 0 for anywhere. Up to ``n_assumed`` tokens
    count as matching while the reply is at its place, although fewer were compared.
    """

    def __init__(
        self, index: TokenIndex, maximum: int, *, place: int = 0, n_assumed: int = 0
    ) -> None:
        """Start before the first token of the reply."""
        self._index = index
        self._maximum = maximum
        self._n_assumed = n_assumed
        self._alignment = Alignment(index)
        self._alignment.place = place
        self._n_compared = -1  # tokens of the sequence; -1 before the first comparison

    def match(self, job: DraftJob, draft: tuple[int, ...] = ()) -> Match:
        """Return the place to copy from, as `DraftSource.match`, once all new tokens of ``job`` are
        compared.
        """
        text = _last_tokens(job)
        self._compare(job, text)
        match = self._aligned_match(draft)
        if match is not None:
            return match
        if not draft:  # the index was searched for the text alone
            return NO_MATCH
        return self._indexed_match([*text, *draft])

    def _compare(self, job: DraftJob, text: list[int]) -> None:
        """Compare the reply with its source up to the last sure token; ``text`` ends with that."""
        n = job.seq.n + len(job.sure)
        if self._n_compared < 0:
            self._n_compared = n - 1
        n_fresh = n - self._n_compared
        if n_fresh == 0:  # compared earlier in this step
            return
        if n_fresh > len(text):  # not called for more than CONTEXT tokens
            self._alignment.restart()
            n_fresh = 0
        self._n_compared = n
        fresh = text[len(text) - n_fresh :]
        self._alignment.advance(fresh, text)

    def _indexed_match(self, text: list[int]) -> Match:
        """Return the longest match of the end of ``text`` in the whole index."""
        end = text[-CONTEXT:]
        place, length = self._index.find(end, self._alignment.preferred_place)

        def read(n: int) -> tuple[int, ...]:
            n_read = min(n, self._maximum)
            return tuple(self._index.read(place, n_read))

        return Match(length, read)

    def _aligned_match(self, draft: tuple[int, ...]) -> Match | None:
        """Return the match at the place of the reply, None if it has none or another text is
        expected there than ``draft``.
        """
        alignment = self._alignment
        if not alignment.place:
            return None
        n_drafted = len(draft)
        expected = (
            expected_token.token for expected_token in alignment.expect(n_drafted + self._maximum)
        )
        if tuple(islice(expected, n_drafted)) != draft:
            return None

        def read(n: int) -> tuple[int, ...]:
            n_read = min(n, self._maximum)
            return tuple(islice(expected, n_read))

        n_matched = max(alignment.length, self._n_assumed)
        return Match(n_matched + n_drafted, read)


def _last_tokens(job: DraftJob) -> list[int]:
    """Return the last CONTEXT evaluated tokens, and the sure ones."""
    first = max(job.seq.n - CONTEXT, 0)
    evaluated = job.seq.tokens[first:]
    return [*evaluated.tolist(), *job.sure]
