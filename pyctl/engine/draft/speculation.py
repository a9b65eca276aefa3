"""Speculation: collects drafts from all sources for decoding requests, and reports the results to
the sources.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from pyctl.engine.backend import NO_SPAN, BackendFacts, DraftSpan, Evaluator, SequenceTokens
from pyctl.engine.draft.accepted_share import Origin
from pyctl.engine.draft.cache_drafts import CacheDrafts
from pyctl.engine.draft.draft_length import DraftLengthController
from pyctl.engine.draft.prediction import PredictionDrafts
from pyctl.engine.draft.source import CopyingSource, DraftJob, DraftSource
from pyctl.engine.draft.step_costs import GRAPH_MS
from pyctl.errors import EngineError
from pyctl.prompt import Tokens

__all__ = ["NO_DRAFT", "Draft", "ModelDrafts", "Speculation"]

log = logging.getLogger(__name__)

ROW_PADDING = 256
"""llama.cpp reads rows up to the next multiple of this (`llama_kv_cache::get_n_kv`), and a GPU sums
each number of rows in other parts. Contexts are also multiples of it."""

SHADOW = 8
"""Tokens of a proposal that are kept to learn from, if fewer are drafted."""

PATIENCE = 16
"""Steps without a draft of a text after which texts are searched in one of STRIDE steps."""

STRIDE = 4
"""Steps for one search then, which takes 50 microseconds, times the number of requests."""


class Draft(NamedTuple):
    """Tokens evaluated after a request's sure ones: the first ``n_drafted`` come from a source, the
    rest is padding. Those in ``predicted`` come from the request's prediction.
    """

    tokens: tuple[int, ...] = ()
    n_drafted: int = 0
    predicted: DraftSpan = NO_SPAN


NO_DRAFT = Draft()


class _Proposal(NamedTuple):
    """Tokens after the first ``place`` of a request: those of another source, which continue
    those of ``origin``.
    """

    place: int
    before: tuple[int, ...]
    tokens: tuple[int, ...]
    origin: Origin


class ModelDrafts:
    """Drafts of up to ``n_max`` tokens by the draft model of ``evaluator``; drops those below
    ``n_min`` tokens.
    """

    def __init__(self, evaluator: Evaluator, n_max: int, n_min: int = 0) -> None:
        self.name = evaluator.facts.draft_type
        self.n_max = n_max
        self._n_min = n_min
        self._evaluator = evaluator

    def propose(self, jobs: Sequence[DraftJob], n: int = 0) -> list[tuple[int, ...]]:
        """Return up to ``n`` tokens, or ``n_max``, for each of ``jobs``."""
        items = [SequenceTokens(job.seq.id, job.sure, job.seq.n, len(job.sure)) for job in jobs]
        n = n or self.n_max
        minimum = self._n_min
        if minimum <= self.n_max:  # else no draft is long enough
            minimum = min(minimum, n)
        drafts = self._evaluator.draft(items, n)
        return [draft if len(draft) >= minimum else () for draft in drafts]


class Speculation:
    """Drafts that start with the proposal of ``sources`` or of the draft model, whichever gains
    more by ``lengths``, and continue with tokens that ``sources`` have after them.

    Without ``lengths`` a draft of ``sources`` comes before one of the model, and all have the
    largest allowed length. With ``width`` each is cut or padded to that many tokens, so that the
    computation does not depend on the drafts (`_n_of_one_length`). ``predictions``, None if drafts
    are off, come before the ``sources``. ``names`` are those of the sources, as in ``--spec-type``;
    ``seconds`` is the clock that the model is measured by.
    """

    def __init__(
        self,
        sources: Sequence[DraftSource] = (),
        model: ModelDrafts | None = None,
        *,
        predictions: PredictionDrafts | None = None,
        lengths: DraftLengthController | None = None,
        width: int = 0,
    ) -> None:
        """Start without requests; see the class for the arguments."""
        self._sources = tuple(sources)
        self._has_own_sources = bool(sources)
        self._predictions = predictions
        if predictions is not None:
            self._sources = (predictions, *sources)
        self._model = model
        self.lengths = lengths
        self.width = width
        names = [source.name for source in sources]
        if model is not None:
            names.append(model.name)
        self.names = tuple(names)
        self.seconds = time.perf_counter
        # By request, those that its reply has not reached yet.
        self._proposals: defaultdict[int, list[_Proposal]] = defaultdict(list)
        self._idle: defaultdict[int, int] = defaultdict(int)  # steps without a draft of a text
        # The current step: its jobs, where the last tokens of their drafts come from, and the time
        # of the model.
        self._jobs: Sequence[DraftJob] = ()
        self._origins: dict[int, Origin] = {}
        self._predicted: dict[int, DraftSpan] = {}  # the drafts that come from a prediction
        self._proposing: tuple[int, float] | None = None

    @classmethod
    def from_facts(
        cls,
        facts: BackendFacts,
        sources: Sequence[CopyingSource],
        model: ModelDrafts | None,
        *,
        n_draft: int,
        exact: bool,
    ) -> tuple[Speculation, str]:
        """Return the speculation that a backend with ``facts`` allows, and the reason why it is off
        although there are drafts; "" if it is on, or there are none.

        With ``exact`` each draft has ``n_draft`` tokens, or as many as the backend takes back at no
        cost: a reply must not depend on the drafts that others have. So predictions are drafted
        wherever a backend can verify drafts, with ``exact`` only if all requests have drafts.
        """
        has_drafts = any(source.maximum for source in sources)
        if model is not None and model.n_max > 0:
            has_drafts = True
        width = 0
        if exact:
            width = min(n_draft, facts.n_rollback)
        reason = _why_off(facts, width, exact=exact)
        if has_drafts and reason:
            return cls(), reason
        predictions = None
        if not reason and (has_drafts or not exact):
            predictions = PredictionDrafts()
        if exact:
            return cls(sources, model, predictions=predictions, width=width), ""
        graph_ms = 0.0
        if facts.is_async:
            graph_ms = GRAPH_MS
        lengths = DraftLengthController(
            n_free=facts.n_rollback,
            graph_ms=graph_ms,
            has_state_history=facts.has_state_history,
        )
        return cls(sources, model, predictions=predictions, lengths=lengths), ""

    def __bool__(self) -> bool:
        """Return whether any request may have drafts now."""
        if self._has_own_sources or self._model is not None:
            return True
        return bool(self._predictions)

    @property
    def drafts_predictions(self) -> bool:
        """True if a request with a prediction gets drafts from it."""
        return self._predictions is not None

    @property
    def n_bytes(self) -> int:
        """Approximate bytes of the texts that sources keep across requests."""
        n_bytes = 0
        for source in self._sources:
            if isinstance(source, CacheDrafts):
                n_bytes += source.n_bytes
        return n_bytes

    def forget(self) -> None:
        """Drop the texts that sources keep across requests."""
        for source in self._sources:
            if isinstance(source, CacheDrafts):
                source.forget()

    @contextlib.contextmanager
    def following(
        self,
        key: int,
        prompt: Tokens,
        *,
        prediction: tuple[int, ...] = (),
        may_read_prompts: bool = True,
    ) -> Iterator[None]:
        """Register request ``key``, whose reply may be the ``prediction``, with the sources;
        without ``may_read_prompts`` not with those that keep others' texts.

        The counts and the pace of accepted drafts would show such a client whether its guess of a
        text is right.
        """
        try:
            if self._predictions is not None:
                self._predictions.predict(key, prediction)
            for source in self._sources:
                if may_read_prompts or not isinstance(source, CacheDrafts):
                    source.begin(key, prompt)
            yield
        finally:
            self._proposals.pop(key, None)
            self._idle.pop(key, None)
            if self.lengths is not None:
                self.lengths.end(key)
            for source in self._sources:
                source.end(key)

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """Return drafts for each of ``jobs`` of one step, within their limits."""
        self._jobs = jobs
        self._origins.clear()
        self._predicted.clear()
        self._proposing = None
        for job in jobs:
            self._compare(job)
        drafts: list[tuple[int, ...]] = [()] * len(jobs)
        asked: list[int] = []
        if self.lengths is None or self.lengths.may_copy(len(jobs)):
            asked = [i for i, job in enumerate(jobs) if self._is_asked(job)]
        for source in self._sources:
            without_draft = [i for i in asked if not drafts[i]]
            self._copy(source, drafts, without_draft)
        if self._model is not None:
            self._draft_with_model(self._model, drafts)
        for source in self._sources:
            with_draft = [i for i in asked if drafts[i]]
            self._copy(source, drafts, with_draft)
        for job in jobs:
            self._count_idle(job)
        pairs = list(zip(jobs, drafts, strict=True))
        if self.lengths is not None:
            sizes = [(len(job.sure), len(tokens)) for job, tokens in pairs]
            has_text = any(origin.is_text for origin in self._origins.values())
            self.lengths.record_batches(sizes, has_text=has_text)
        return [self._draft(job, tokens) for job, tokens in pairs]

    def record(self, accepted: Mapping[int, int], n_tokens: int, decode_ms: float | None) -> None:
        """Record that the step evaluated ``n_tokens`` in ``decode_ms``, None if the step also did
        other work, and how many drafts of each request were accepted.
        """
        if self.lengths is not None:
            self.lengths.record(accepted, n_tokens, decode_ms, self._proposing)

    def _is_asked(self, job: DraftJob) -> bool:
        """Return whether texts may continue ``job``."""
        if self.lengths is None:
            return True
        idle = self._idle[job.key]
        return idle < PATIENCE or idle % (STRIDE * len(self._jobs)) == 0

    def _count_idle(self, job: DraftJob) -> None:
        """Count the step if no draft of ``job`` comes from a text."""
        origin = self._origins.get(job.key)
        if origin is not None and origin.is_text:
            self._idle[job.key] = 0
        else:
            self._idle[job.key] += 1

    def _n_allowed(self, job: DraftJob, origin: Origin, limit: int, n_before: int = 0) -> int:
        """Return how many drafts follow ``n_before`` others, within ``limit`` for all."""
        if self.width:
            limit = min(limit, self._n_of_one_length(job))
        limit -= n_before
        if limit <= 0 or self.lengths is None:
            return max(limit, 0)
        if n_before and len(self._jobs) > 1:  # only as far as rollback is free
            limit = min(limit, self.lengths.n_free - n_before)
        return self.lengths.length(job.key, origin, limit, len(self._jobs), n_before=n_before)

    def _n_of_one_length(self, job: DraftJob) -> int:
        """Return how many drafts of ``job`` are evaluated with as many rows as in any other batch.

        A batch of 1 + ``width`` tokens that starts less than that before a multiple of ROW_PADDING
        reads more rows than one that starts earlier. So the last ``width`` positions before each
        multiple are only evaluated as the first token of a batch, never as a draft.
        """
        first = job.seq.n + len(job.sure)
        n_left = ROW_PADDING - first % ROW_PADDING
        return min(max(n_left - self.width, 0), self.width)

    def _draft_with_model(self, model: ModelDrafts, found: list[tuple[int, ...]]) -> None:
        """Draft with the model, in one evaluation, for all jobs for which no source gains more.

        All get the largest wanted length, since one evaluation verifies drafts of equal length.
        Behind many sure tokens, which follow a rollback to a mark, a head would have to draft
        through each of these first.
        """
        own = Origin(model.name)
        began = self.seconds()
        leading: list[tuple[int, DraftJob, int]] = []
        for i, job in enumerate(self._jobs):
            if job.maximum <= 0 or len(job.sure) > 1 + model.n_max:
                continue
            limit = min(job.maximum, model.n_max)
            n = self._n_allowed(job, own, limit)
            if self._model_beats_source(own, n, job, found[i]):
                leading.append((i, job, n))
        n = max((n for _, _, n in leading), default=0)
        if not n:  # sources gain more everywhere, or the model pauses
            return
        eligible = [(i, job) for i, job, _ in leading if job.maximum >= n]
        jobs = [job for _, job in eligible]
        try:
            drafts = model.propose(jobs, n)
        except EngineError as error:  # decoding continues without drafts
            log.warning("draft source %s failed: %s", model.name, error)
            return
        ms = (self.seconds() - began) * 1e3
        self._proposing = n, ms
        for (i, job), proposed in zip(eligible, drafts, strict=True):
            draft = tuple(takewhile(_is_text, proposed[:n]))
            if draft:
                found[i] = draft
                self._origins[job.key] = own
                self._predicted.pop(job.key, None)
                self._propose(job, (), draft, own)

    def _model_beats_source(
        self, own: Origin, n: int, job: DraftJob, found: tuple[int, ...]
    ) -> bool:
        """Return whether ``n`` drafts of the model gain more than those that another source has
        ``found`` for ``job``.
        """
        if not found:
            return True
        origin = self._origins[job.key]
        n_seqs = len(self._jobs)
        if not n or self.lengths is None:
            return n > 0 and own.prior >= origin.prior
        return self.lengths.model_beats_text(
            key=job.key,
            model=own,
            n=n,
            text=origin,
            n_text=len(found),
            n_seqs=n_seqs,
        )

    def _copy(
        self, source: DraftSource, found: list[tuple[int, ...]], wanted: Sequence[int]
    ) -> None:
        """Let ``source`` start or continue the drafts of the ``wanted`` jobs, and keep what it
        proposes to learn.
        """
        for i in wanted:
            job = self._jobs[i]
            draft = found[i]
            names: list[str] = []
            if draft:
                names = self._origins[job.key].source.split("+")
            if source.name in names:
                continue
            match = source.match(job, draft)
            if not match.n:
                continue
            name = "+".join((*names, source.name))
            origin = Origin.from_match(name, match.n)
            n = self._n_allowed(job, origin, job.maximum, len(draft))
            if not n and self.lengths is None:
                continue
            # Some are read to learn from, even if none are drafted.
            n_read = max(n, origin.counted(SHADOW))
            more = tuple(takewhile(_is_text, match.read(n_read)))
            self._propose(job, draft, more, origin)
            if n and more:
                found[i] = draft + more[:n]
                self._origins[job.key] = origin
                if source is self._predictions:
                    self._predicted[job.key] = DraftSpan(len(draft), len(found[i]))

    def _propose(
        self, job: DraftJob, before: tuple[int, ...], tokens: tuple[int, ...], origin: Origin
    ) -> None:
        """Keep a proposal to compare it with the reply."""
        if self.lengths is None or not tokens:
            return
        position = job.seq.n + len(job.sure)
        proposal = _Proposal(position, before, tokens, origin)
        self._proposals[job.key].append(proposal)

    def _compare(self, job: DraftJob) -> None:
        """Learn from earlier proposals for where the reply of ``job`` is now, evaluated or not."""
        left: list[_Proposal] = []
        for proposal in self._proposals.get(job.key, ()):
            said = _tokens_from(job, proposal.place)
            tokens = proposal.before + proposal.tokens
            n_right = _n_equal(said, tokens)
            if n_right == len(said) < len(tokens):  # the reply may still be right
                left.append(proposal)
            else:
                self._learn(job.key, proposal, n_right)
        if job.key in self._proposals:
            self._proposals[job.key] = left

    def _learn(self, key: int, proposal: _Proposal, n_right: int) -> None:
        """Count a proposal whose first ``n_right`` tokens are the reply's."""
        assert self.lengths is not None
        origin = proposal.origin
        n_before = len(proposal.before)
        if n_before:
            first = origin._replace(is_before=True)
            self.lengths.learn(key, first, n_before, min(n_right, n_before))
        if n_right >= n_before:
            n_tokens = len(proposal.tokens)
            self.lengths.learn(key, origin, n_tokens, n_right - n_before)

    def _draft(self, job: DraftJob, tokens: tuple[int, ...]) -> Draft:
        n = len(tokens)
        width = min(self.width, job.maximum)
        if n == 0 and width == 0:
            return NO_DRAFT
        padding = job.sure[-1:] * (width - n)
        predicted = self._predicted.get(job.key, NO_SPAN)
        return Draft((*tokens, *padding), n, predicted)


def _tokens_from(job: DraftJob, place: int) -> tuple[int, ...]:
    """Return the tokens of ``job`` from ``place`` on, the sure ones included."""
    evaluated = job.seq.tokens[place:].tolist()
    n_skipped = max(place - job.seq.n, 0)
    sure = job.sure[n_skipped:]
    return (*evaluated, *sure)


def _n_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many of the first tokens of both are equal."""
    n = 0
    for token, other in zip(tokens, others, strict=False):
        if token != other:
            break
        n += 1
    return n


def _why_off(facts: BackendFacts, width: int, *, exact: bool) -> str:
    """Return why a backend with ``facts`` cannot verify drafts; "" if it can."""
    if not facts.max_drafts:
        return "this model's memory has no rollback"
    if exact and not width:
        # A way back to a mark evaluates tokens again, in other batches than before.
        return "with --exact, this model takes drafts from a head or a draft model only"
    return ""


def _is_text(token: int) -> bool:
    """Return whether a model can generate ``token``; negative ids are tokens of images."""
    return token >= 0
