"""Asks the sources of drafts, in their order, for all that decode, and makes verify batches of what they say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from pyctl.engine.backend import Evaluator, SequenceTokens
from pyctl.engine.draft.source import DraftJob, DraftSource
from pyctl.prompt import Tokens

__all__ = ["Draft", "ModelDrafts", "Speculation"]


class Draft(NamedTuple):
    """What is evaluated behind a request's sure tokens; the first ``n_drafted`` come from a source.

    ``n_taken``: see `pyctl.engine.decode.Verify`.
    """

    tokens: tuple[int, ...] = ()
    n_drafted: int = 0
    n_taken: int = -1


class ModelDrafts:
    """A source: what the draft model of ``evaluator`` expects, ``n_max`` tokens each time or none at all."""

    def __init__(self, evaluator: Evaluator, n_max: int) -> None:
        self.name = evaluator.draft_type
        self.n_max = n_max
        self._evaluator = evaluator

    def begin(self, key: int, prompt: Tokens) -> None:
        pass

    def propose(self, jobs: Sequence[DraftJob]) -> list[tuple[int, ...]]:
        drafts: list[tuple[int, ...]] = [()] * len(jobs)
        able = [i for i, job in enumerate(jobs) if job.most >= self.n_max]
        items = [SequenceTokens(job.seq.id, job.sure, job.seq.n, len(job.sure)) for job in (jobs[i] for i in able)]
        for i, draft in zip(able, self._evaluator.draft(items, self.n_max) if items else (), strict=True):
            drafts[i] = draft[: self.n_max]
        return drafts

    def learn(self, key: int, n_drafted: int, n_accepted: int) -> None:
        pass

    def end(self, key: int) -> None:
        pass


class Speculation:
    """Drafts from the first of ``sources`` that has any, and what became of them back to it."""

    def __init__(self, sources: Sequence[DraftSource]) -> None:
        self._sources = tuple(sources)
        self._drafted_by: dict[int, DraftSource] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the sources, as in ``--spec-type``, in the order in which they are asked."""
        return tuple(source.name for source in self._sources)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._sources)

    @contextlib.contextmanager
    def following(self, key: int, prompt: Tokens) -> Iterator[Callable[[int, int], None]]:
        """The sources know request ``key`` meanwhile; yields what is told the numbers of `DraftSource.learn`."""
        try:
            for source in self._sources:
                source.begin(key, prompt)
            yield partial(self._learn, key)
        finally:
            self._drafted_by.pop(key, None)
            for source in self._sources:
                source.end(key)

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """Drafts for each of ``jobs``, never more than may follow."""
        drafts = [Draft()] * len(jobs)
        unserved = [i for i, job in enumerate(jobs) if job.most > 0]
        for source in self._sources:
            if not unserved:
                break
            found = source.propose([jobs[i] for i in unserved])
            for i, tokens in zip(unserved, found, strict=True):
                if tokens:
                    n = min(len(tokens), jobs[i].most)
                    drafts[i] = Draft(tokens[:n], n)
                    self._drafted_by[jobs[i].key] = source
            unserved = [i for i in unserved if not drafts[i].tokens]
        return drafts

    def _learn(self, key: int, n_drafted: int, n_accepted: int) -> None:
        self._drafted_by[key].learn(key, n_drafted, n_accepted)
