"""Speculation: collects drafts from all sources for decoding requests, and reports the results to the sources."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from pyctl.engine.backend import Evaluator, SequenceTokens
from pyctl.engine.draft.draft_length import DraftLengthController, DraftResult, Origin
from pyctl.engine.draft.source import DraftJob, DraftSource, RememberingSource
from pyctl.errors import EngineError
from pyctl.prompt import Tokens

__all__ = ["NO_DRAFT", "Draft", "ModelDrafts", "Speculation"]

log = logging.getLogger(__name__)


class Draft(NamedTuple):
    """Tokens evaluated after a request's sure ones: the first ``n_drafted`` come from a source, the rest is padding."""

    tokens: tuple[int, ...] = ()
    n_drafted: int = 0


NO_DRAFT = Draft()


class _Part(NamedTuple):
    source: DraftSource | ModelDrafts
    origin: Origin
    n: int


class ModelDrafts:
    """Drafts of up to ``n_max`` tokens by the draft model of ``evaluator``; drops those below ``n_min`` tokens."""

    def __init__(self, evaluator: Evaluator, n_max: int, n_min: int = 0) -> None:
        self.name = evaluator.facts.draft_type
        self.n_max, self._n_min = n_max, n_min
        self._evaluator = evaluator

    def propose(self, jobs: Sequence[DraftJob], n: int = 0) -> list[tuple[int, ...]]:
        """Return up to ``n`` tokens, or ``n_max``, for each of ``jobs``."""
        items = [SequenceTokens(job.seq.id, job.sure, job.seq.n, len(job.sure)) for job in jobs]
        n = n or self.n_max
        least = self._n_min if self._n_min > self.n_max else min(self._n_min, n)
        return [draft if len(draft) >= least else () for draft in self._evaluator.draft(items, n)]


class Speculation:
    """Drafts that begin with what ``sources`` or the draft model propose, whichever promises more by ``lengths``, and
    go on with what ``sources`` know to follow.

    Without ``lengths`` a draft of ``sources`` comes before one of the model, and all have the largest allowed length.
    With ``width`` each is cut or padded to that many tokens, so that the computation does not depend on the drafts.
    """

    def __init__(
        self,
        sources: Sequence[DraftSource] = (),
        model: ModelDrafts | None = None,
        *,
        lengths: DraftLengthController | None = None,
        width: int = 0,
    ) -> None:
        self._sources, self._model = tuple(sources), model
        self._lengths, self._width = lengths, width
        # The current step: its jobs, the parts of their drafts, and the results.
        self._jobs: Sequence[DraftJob] = ()
        self._parts: dict[int, list[_Part]] = {}
        self._results: dict[int, DraftResult] = {}
        self._proposing_ms: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Whether there are any sources."""
        return bool(self._sources) or self._model is not None

    @staticmethod
    def seconds() -> float:
        """Return the time by which sources are measured."""
        return time.perf_counter()

    @property
    def n_bytes(self) -> int:
        """Approximate bytes of the texts that sources keep across requests."""
        return sum(source.n_bytes for source in self._sources if isinstance(source, RememberingSource))

    def forget(self) -> None:
        """Drop the texts that sources keep across requests."""
        for source in self._sources:
            if isinstance(source, RememberingSource):
                source.forget()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources, as in ``--spec-type``, in the order of their use."""
        names = [source.name for source in self._sources]
        return (*names, self._model.name) if self._model is not None else tuple(names)

    @contextlib.contextmanager
    def following(self, key: int, prompt: Tokens) -> Iterator[Callable[[int, int], None]]:
        """Register request ``key`` with the sources; yields a callback for (n_drafted, n_accepted)."""
        try:
            for source in self._sources:
                source.begin(key, prompt)
            yield partial(self._learn, key)
        finally:
            self._parts.pop(key, None)
            if self._lengths is not None:
                self._lengths.end(key)
            for source in self._sources:
                source.end(key)

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """Return drafts for each of ``jobs`` of one step, within their limits."""
        self._jobs = jobs
        self._parts.clear()
        self._results.clear()
        self._proposing_ms.clear()
        found: list[tuple[int, ...]] = [()] * len(jobs)
        for source in self._sources:
            self._copy(source, found, [i for i, draft in enumerate(found) if not draft])
        if self._model is not None:
            self._ask_model(self._model, found)
        for source in self._sources:
            self._copy(source, found, [i for i, draft in enumerate(found) if draft])
        return [self._draft(job, tokens) for job, tokens in zip(jobs, found, strict=True)]

    def record(self, n_tokens: int, decode_ms: float | None) -> None:
        """Record that the step evaluated ``n_tokens`` in ``decode_ms``, None if the step also did other work."""
        if self._lengths is not None and self._jobs:
            drafts = [self._results.get(job.key) or DraftResult(job.key) for job in self._jobs]
            self._lengths.record(drafts, n_tokens, decode_ms, self._proposing_ms)

    def _most(self, job: DraftJob, origin: Origin, limit: int, behind: int = 0) -> int:
        """Return how many drafts follow ``behind`` others, within ``limit`` for all."""
        limit = (min(limit, self._width) if self._width else limit) - behind
        if limit <= 0 or self._lengths is None:
            return max(limit, 0)
        if behind and len(self._jobs) > 1:  # only as far as rollback is free
            limit = min(limit, self._lengths.n_free - behind)
        return self._lengths.length(job.key, origin, limit, len(self._jobs), behind=behind)

    def _ask_model(self, model: ModelDrafts, found: list[tuple[int, ...]]) -> None:
        """Draft with the model, in one evaluation, for all jobs for which no source promises more.

        All get the largest wanted length, since one evaluation verifies drafts of equal length. Behind many sure
        tokens, which follow a rollback to a mark, a head would have to draft through each of these first.
        """
        own, began = Origin(model.name), self.seconds()
        able = [(i, job) for i, job in enumerate(self._jobs) if job.most > 0 and len(job.sure) <= 1 + model.n_max]
        lengths = [self._most(job, own, min(job.most, model.n_max)) for _, job in able]
        leading = [(i, job, n) for (i, job), n in zip(able, lengths, strict=True) if self._leads(own, n, job.key)]
        if n := max((n for _, _, n in leading), default=0):
            wanted = [(i, job) for i, job, _ in leading if job.most >= n]
            try:
                drafts = model.propose([job for _, job in wanted], n)
            except EngineError as error:  # decoding continues without drafts
                log.warning("draft source %s failed: %s", model.name, error)
                return
            self._proposing_ms[model.name] = (self.seconds() - began) * 1e3
            for (i, job), proposed in zip(wanted, drafts, strict=True):
                if draft := tuple(takewhile(_is_text, proposed[:n])):
                    found[i], self._parts[job.key] = draft, [_Part(model, own, len(draft))]

    def _leads(self, own: Origin, n: int, key: int) -> bool:
        """Whether ``n`` drafts of the model promise more than what another source has drafted for request ``key``."""
        if key not in self._parts:
            return True
        ((_, origin, n_found),), n_seqs = self._parts[key], len(self._jobs)
        if not n or self._lengths is None:
            return n > 0 and own.prior >= origin.prior
        return self._lengths.gain(key, own, n, n_seqs) > self._lengths.gain(key, origin, n_found, n_seqs)

    def _copy(self, source: DraftSource, found: list[tuple[int, ...]], wanted: Sequence[int]) -> None:
        """Let ``source`` begin or continue the drafts of the ``wanted`` jobs."""
        began, has_copied = self.seconds(), False
        for i in wanted:
            job, draft = self._jobs[i], found[i]
            parts = self._parts.get(job.key, [])
            if any(part.source is source for part in parts) or not (match := source.match(job, draft)).n:
                continue
            origin = Origin.of("+".join((*(part.source.name for part in parts), source.name)), match.n)
            if n := self._most(job, origin, job.most, len(draft)):
                has_copied = True
                if more := tuple(takewhile(_is_text, match.read(n))):
                    found[i], self._parts[job.key] = draft + more, [*parts, _Part(source, origin, len(more))]
        if has_copied:
            ms = (self.seconds() - began) * 1e3
            self._proposing_ms[source.name] = self._proposing_ms.get(source.name, 0.0) + ms

    def _draft(self, job: DraftJob, tokens: tuple[int, ...]) -> Draft:
        n, width = len(tokens), min(self._width, job.most)
        if n == 0 and width == 0:
            return NO_DRAFT
        return Draft((*tokens, *job.sure[-1:] * (width - n)), n)

    def _learn(self, key: int, n_drafted: int, n_accepted: int) -> None:
        parts, results, n_before = self._parts[key], list[DraftResult](), 0
        for _, origin, n in parts:
            drafted, accepted = (min(max(each - n_before, 0), n) for each in (n_drafted, n_accepted))
            if not drafted or n_accepted < n_before:  # tokens behind a wrong one say nothing
                break
            results.append(DraftResult(key, origin, drafted, accepted))
            n_before += n
        composed = DraftResult(key, parts[-1].origin, n_drafted, n_accepted)
        if len(parts) > 1:
            n_first = sum(part.n for part in parts[:-1])
            first = composed.origin._replace(is_before=True)
            results.append(DraftResult(key, first, min(n_drafted, n_first), min(n_accepted, n_first)))
            if len(results) <= len(parts):  # not compared
                results.append(composed._replace(n_drafted=0, n_accepted=0))
            composed = composed._replace(parts=tuple(results))
        self._results[key] = composed


def _is_text(token: int) -> bool:
    """Whether a model can generate ``token``; negative ids are tokens of images."""
    return token >= 0
