"""Decoding: samples tokens from one evaluation's outputs for the next evaluation, until the reply
ends.

A step evaluates the sampled tokens and, optionally, drafts. Every token is sampled from the model's
outputs, so drafts save steps and never change the reply.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Generator
from types import TracebackType

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.sequence import LiveSequence
from pyctl.engine.backend import Evaluator, Sampler, TopTokens, VerifyOutputs
from pyctl.engine.exact_reply import ReplyTrace
from pyctl.engine.handle import RequestHandle
from pyctl.engine.jobs import StateReads
from pyctl.engine.request import DraftCounts, Piece, StopType, Timings
from pyctl.engine.stream import LineLimits, ReasoningBudget, TextStream

__all__ = ["Generation"]


class Generation:
    """A reply on the sequence ``seq``: after the prompt, `first` samples one token and `generate`
    all others.

    Events go to ``handle``. ``n_predicted`` counts sampled tokens; ``first_token`` is the time of
    the first one in seconds of the performance counter, 0 for none. A ``trace`` that is set before
    `first` gets the tokens and the digests of their logits. A ``with`` block creates and frees the
    sampler, so that an invalid grammar raises RequestError before the prompt is evaluated. The
    sequence may be suspended between two steps.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        handle: RequestHandle,
        seq: LiveSequence,
        state_reads: StateReads,
    ) -> None:
        """Prepare the text, the stops and the limits of the reply; nothing is sampled yet."""
        request = handle.request
        room = evaluator.facts.n_ctx - len(request.prompt)
        self.n_predicted = 0
        self.stop_type: StopType = "limit"
        self.first_token = 0.0
        self.trace: ReplyTrace | None = None
        self._evaluator = evaluator
        self._handle = handle
        self._request = request
        self._seq = seq
        self._state_reads = state_reads
        self._is_end = evaluator.vocabulary.is_end
        self._piece = evaluator.vocabulary.piece
        self._limit = room if request.max_tokens < 0 else min(request.max_tokens, room)
        self._ended = self._limit == 0
        self._text = TextStream(request.stop)
        self._lines = LineLimits(request.n_indent) if request.n_indent or request.max_ms else None
        self._budget = (
            ReasoningBudget(request.reasoning, self._piece)
            if request.reasoning is not None
            else None
        )
        self._sampler: Sampler | None = None
        self._token = 0
        self._unsent: list[int] = []
        self._probs: list[TopTokens] = []
        self._starts: list[int] = []  # of these tokens in the reply, in characters
        self._n_sent = 0  # characters

    @property
    def stopping_word(self) -> str:
        """The stop string that ended the reply, empty for none."""
        return self._text.stopping_word

    def __enter__(self) -> Generation:
        if not self._ended:
            self._sampler = self._evaluator.sampler(
                self._request.sampling, self._request.prompt.tokens
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._sampler is not None:
            self._sampler.close()

    def timings(self, stats: RequestStats, submitted: float, started: float) -> Timings:
        """Return the timings of the ended reply; ``submitted`` and ``started`` are performance
        counter seconds.
        """
        finished = time.perf_counter()
        first_token = self.first_token or finished
        return Timings(
            n_cached=stats.n_cached,
            n_evaluated=stats.n_evaluated,
            prompt_ms=(first_token - started) * 1e3,
            n_predicted=self.n_predicted,
            predicted_ms=(finished - first_token) * 1e3,
            first_token_ms=(first_token - submitted) * 1e3,
            drafts=self._handle.drafts,
            queued_ms=(started - submitted) * 1e3,
        )

    def first(self) -> None:
        """Sample the first token from output 0, unless the limit is 0 tokens."""
        if not self._ended:
            self._token = self._next(0)

    def generate(self) -> Generator[tuple[int, ...], VerifyOutputs, None]:
        """Evaluate and sample until the reply ends; the sequence then holds at most all tokens but
        the last.
        """
        seq = self._seq
        sure: tuple[int, ...] = (self._token,)
        while not self._ended:
            verify = yield sure
            for token in sure:
                seq.append_one(token)
            sure = self._match(verify) if verify.drafts else (self._next(verify.output),)
        is_cut = self._text.stopping_word or (self._lines is not None and self._lines.ended)
        rest = self._text.flush() if not is_cut else ""
        if rest or self._unsent or (self._probs and not is_cut):
            self._send(rest, n_probs=0 if is_cut else len(self._probs))

    def _match(self, verify: VerifyOutputs) -> tuple[int, ...]:
        """Sample while tokens match the drafts, roll the other drafts back, and return the tokens
        to evaluate next.

        Padding is rolled back even where the reply goes on like it: only drafts lie where any batch
        would have them.
        """
        output, drafts, n_drafted = verify
        seq = self._seq
        n_right = 0
        while True:
            token = self._next(output + n_right)
            if n_right == n_drafted or token != drafts[n_right]:
                break
            n_right += 1
            if self._ended:
                break
            seq.append_one(token)
        if n_drafted:
            self._handle.drafts += DraftCounts.of_draft(n_drafted, n_right)
        if n_right == len(drafts) and not self._ended:
            return (token,)
        held = self._evaluator.memory.rollback(seq.id, seq.n)
        if held == seq.n:
            return (token,)
        again = tuple(seq.tokens[held:].tolist())
        seq.truncate(held)
        return (*again, token)

    def _next(self, index: int) -> int:
        """Sample from output ``index``, send the final text, and record whether the reply has
        ended.
        """
        sampler = self._sampler
        assert sampler is not None
        budget = self._budget
        with self._state_reads.allowed():  # for the device, if it has only started the evaluation
            token = (
                sampler.sample(index) if budget is None else self._budgeted(sampler, budget, index)
            )
        if self.trace is not None:
            # After sampling: the device has finished, and the logits are in the processor's cache.
            self.trace.seed = sampler.seed
            self.trace.tokens.append(token)
            self.trace.digests.append(self._evaluator.logits_digest(index))
        if self.n_predicted == 0:
            self.first_token = time.perf_counter()
        self.n_predicted += 1
        if self._is_end(token):
            self.stop_type = "eos"
            self._ended = True
            return token
        self._unsent.append(token)
        if self._request.n_probs is not None:
            self._starts.append(self._n_sent + self._text.n_withheld)
            self._probs.append(self._top_tokens(sampler, index, token))
        text = self._text
        shown = self._request.control_texts.get(token)
        final = text.feed(self._piece(token) if shown is None else shown)
        if self._lines is not None:
            since = (time.perf_counter() - self.first_token) * 1e3
            final = self._lines.feed(final, 0 < self._request.max_ms < since)
            self._ended = self._lines.ended
        if text.stopping_word:
            self.stop_type = "word"
            self._ended = True
            self._send(final)
        elif final:
            self._send(final)
        if self.n_predicted >= self._limit:
            self._ended = True
        return token

    def _budgeted(self, sampler: Sampler, budget: ReasoningBudget, index: int) -> int:
        """Sample a token, or force one when the reasoning budget requires it."""
        if self._handle.ends_reasoning:
            self._handle.ends_reasoning = False
            budget.end()
        token = budget.next()
        if token is None:
            token = sampler.sample(index)
        else:
            sampler.force(index, token)
        budget.observe_token(token)
        return token

    def _top_tokens(self, sampler: Sampler, index: int, token: int) -> TopTokens:
        n = self._request.n_probs or 0
        if self._request.sampling.post_sampling_probs:
            return sampler.top_tokens(token, n)
        return self._evaluator.top_tokens(index, token, n)

    def _send(self, text: str, n_probs: int = 0) -> None:
        """Send ``text``, with the probabilities of the tokens that it starts, or of ``n_probs``."""
        self._n_sent += len(text)
        n_probs = n_probs or bisect_left(self._starts, self._n_sent)
        self._handle.defer(Piece(text, tuple(self._unsent), tuple(self._probs[:n_probs])))
        self._unsent = []
        del self._probs[:n_probs], self._starts[:n_probs]
