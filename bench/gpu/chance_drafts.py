"""`pyctl serve` whose drafts are accepted by chance, to measure speeds that depend on how many are;
replies are none.

    python -m bench.gpu.chance_drafts LENGTH N_MAX -m FILE --spec-type draft-mtp ...

A step yields ``LENGTH`` tokens on average, as with llama-server's ``--spec-synth-len``, from
``N_MAX`` drafts.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

from bench.gpu.speculative_report import acceptance_rates
from pyctl.cli import main as pyctl_main
from pyctl.engine.backend import SequenceTokens
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.sampling.sampler import LlamaVocabulary

__all__ = ["accept_by_chance"]


class _Chance:
    """Which tokens are accepted of the last batch, by the number of the output before each."""

    def __init__(self, rates: Sequence[float]) -> None:
        self._chances = [
            rate / last if last else 0.0 for last, rate in zip((1.0, *rates), rates, strict=False)
        ]
        self._random = random.Random(1)
        self.accepted: dict[int, int] = {}
        self.rejected: dict[int, int] = {}

    def draw(self, items: Sequence[SequenceTokens]) -> None:
        self.accepted.clear()
        self.rejected.clear()
        first = 0
        for item in items:
            drafts = item.tokens[item.n_committed :]
            for i, (token, chance) in enumerate(zip(drafts, self._chances, strict=False)):
                if self._random.random() >= chance:
                    self.rejected[first + i] = token
                    break
                self.accepted[first + i] = token
            first += 1 + len(drafts)


class _ChanceSampler:
    """The sampler of a request: it samples if no draft is accepted, as llama-server's does."""

    def __init__(self, sampler: Any, chance: _Chance, n_vocab: int) -> None:
        self._sampler = sampler
        self._chance = chance
        self._n_vocab = n_vocab

    def sample(self, index: int) -> int:
        if index in self._chance.accepted:
            return self._chance.accepted[index]
        token = int(self._sampler.sample(index))
        return token if token != self._chance.rejected.get(index) else (token + 1) % self._n_vocab

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def accept_by_chance(backend: type[LlamaBackend], length: float, n_max: int) -> None:
    """Have all backends of this class accept ``length`` tokens a step by chance from now on, and
    end no reply.
    """
    chance = _Chance(acceptance_rates(length, n_max))
    decode = backend.decode
    sampler = backend.sampler

    def decoded(self: LlamaBackend, items: Sequence[SequenceTokens]) -> None:
        chance.draw(items)
        decode(self, items)

    def wrapped(self: LlamaBackend, *given: Any) -> Any:
        chance.accepted.clear()
        chance.rejected.clear()
        return _ChanceSampler(sampler(self, *given), chance, self.tokenizer.n_vocab)

    patched: Any = backend
    patched.decode = decoded
    patched.sampler = wrapped
    vocabulary: Any = LlamaVocabulary
    vocabulary.is_end = lambda self, token: False


if __name__ == "__main__":
    accept_by_chance(LlamaBackend, float(sys.argv[1]), int(sys.argv[2]))
    sys.exit(pyctl_main(["serve", *sys.argv[3:]]))
