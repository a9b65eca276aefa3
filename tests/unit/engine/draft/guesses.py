"""Sources of drafts for tests, and a fake model whose samplers notice every token that they see
twice or never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pyctl.engine.backend import TopTokens
from pyctl.engine.draft.source import NO_MATCH, DraftJob, Match
from pyctl.engine.sampling import Sampling
from pyctl.prompt import Prompt, Tokens
from tests.fake import FakeBackend


class Guesses:
    """Drafts ``shortest`` to ``longest`` tokens of the ``replies`` that it knows by their prompts,
    at random.

    A share of ``wrong`` tokens is wrong, a share of ``silent`` times it has nothing.
    """

    def __init__(
        self,
        replies: Mapping[Prompt, Sequence[int]],
        longest: int,
        wrong: float = 0.0,
        silent: float = 0.0,
        seed: int = 0,
        name: str = "guesses",
        *,
        shortest: int = 1,
    ) -> None:
        """Propose up to ``longest`` tokens of the reply in ``replies``: each is wrong with the
        probability ``wrong``, and there is no draft with the probability ``silent``.
        """
        self.name = name
        self.shortest = shortest
        self.longest = longest
        self.wrong = wrong
        self.silent = silent
        self.followed: dict[int, tuple[int, list[int]]] = {}
        self._known = {prompt.tokens.tobytes(): list(reply) for prompt, reply in replies.items()}
        self._random = np.random.default_rng(seed)

    def begin(self, key: int, prompt: Tokens) -> None:
        assert key not in self.followed
        self.followed[key] = int(prompt.size), self._known.get(prompt.tobytes(), [])

    def match(self, job: DraftJob, draft: tuple[int, ...] = ()) -> Match:
        return NO_MATCH if draft else Match(16, lambda n: self._guess(job)[:n])

    def _guess(self, job: DraftJob) -> tuple[int, ...]:
        n_prompt, reply = self.followed[job.key]
        at = job.seq.n + len(job.sure) - n_prompt
        assert [*job.seq.tokens[n_prompt:].tolist(), *job.sure][: len(reply)] == reply[:at], (
            "it goes on as it came"
        )
        if self._random.random() < self.silent:
            return ()
        n = int(self._random.integers(self.shortest, self.longest + 1))
        wrong = self._random.random(n) < self.wrong
        draft = tuple(
            t % 60 + 1 if w else t for t, w in zip(reply[at : at + n], wrong, strict=False)
        )
        return draft

    def end(self, key: int) -> None:
        self.followed.pop(key, None)


class Continuing(Guesses):
    """Proposes as `Guesses` does, unless it never ``leads``, and continues drafts of others; behind
    a wrong one with anything.
    """

    leads = True

    def match(self, job: DraftJob, draft: tuple[int, ...] = ()) -> Match:
        if draft:
            return Match(16, lambda n: self._more(job, draft, n))
        return super().match(job) if self.leads else NO_MATCH

    def _more(self, job: DraftJob, draft: tuple[int, ...], n: int) -> tuple[int, ...]:
        assert n > 0
        n_prompt, reply = self.followed[job.key]
        at = job.seq.n + len(job.sure) - n_prompt
        is_right = reply[at : at + len(draft)] == list(draft)
        if not is_right:
            return (7, 8, 9)[:n]
        return self._guess(DraftJob(job.key, job.seq, (*job.sure, *draft), n))[:n]


class Told:
    """Proposes ``drafts`` by request, and remembers how many tokens there was room for."""

    def __init__(self, name: str, *drafts: tuple[int, ...], n_max: int = 3) -> None:
        self.name, self.drafts, self.n_max = name, dict(enumerate(drafts)), n_max
        self.maximum: dict[int, int] = {}

    def begin(self, key: int, prompt: object) -> None:
        pass

    def propose(self, jobs: Sequence[DraftJob], n: int = 0) -> list[tuple[int, ...]]:
        return [self.drafts[job.key][: n or job.maximum] for job in jobs]

    def match(self, job: DraftJob, draft: tuple[int, ...] = ()) -> Match:
        return NO_MATCH if draft else Match(16, lambda n: self._drafted(job)[:n])

    def _drafted(self, job: DraftJob) -> tuple[int, ...]:
        self.maximum[job.key] = job.maximum
        return self.drafts.get(job.key, ())

    def end(self, key: int) -> None:
        pass


class RememberingBackend(FakeBackend):
    """A backend whose samplers choose by all that they chose before, as with penalties, grammars
    and seeds.
    """

    def sampler(self, sampling: Sampling, prompt: Tokens) -> _RememberingSampler:
        return _RememberingSampler(self, int(sampling.ignore_eos))


class _RememberingSampler:
    def __init__(self, backend: RememberingBackend, first: int) -> None:
        self._backend = backend
        self._first = first
        self._seen = 1

    def sample(self, index: int) -> int:
        value = int.from_bytes(self._backend.outputs[index][:8], "little") ^ self._seen
        return self._saw(self._first + value % (self._backend.n_vocab - self._first))

    @property
    def is_constrained(self) -> bool:
        return False

    def force(self, index: int, token: int) -> None:
        self._saw(token)

    def _saw(self, token: int) -> int:
        self._seen = (self._seen * 1_000_003 + token) % 2**61
        return token

    def top_tokens(self, token: int, n: int) -> TopTokens:
        return ((token, self._seen % 97 / 97),)

    def close(self) -> None:
        pass
