"""Where a chain begins with top-k, only the best tokens are handed to it; nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pyctl.engine.llama import LlamaBackend, Loaded
from pyctl.engine.llama import sampler as sampler_module
from pyctl.engine.sampling import Sampling
from pyctl.prompt import as_tokens

FAST = {
    "default": Sampling(seed=7),
    "greedy": Sampling(temperature=0.0),
    "hot": Sampling(temperature=3.0, top_k=100, top_p=1.0, min_p=0.0, seed=1),
    "one": Sampling(top_k=1, seed=2),
    "all": Sampling(top_k=400, temperature=2.0, top_p=1.0, min_p=0.0, seed=3),
    "xtc": Sampling(xtc_probability=0.5, xtc_threshold=0.01, temperature=2.0, seed=4),
    "order": Sampling(samplers=("top_k", "temperature"), top_k=17, temperature=2.0, seed=5),
}
SLOW = {
    "penalties": Sampling(repeat_penalty=1.5, repeat_last_n=64, seed=7),
    "bias": Sampling(logit_bias=((5, 3.0),), seed=7),
    "dry": Sampling(dry_multiplier=0.8, seed=7),
    "sigma": Sampling(top_n_sigma=1.0, seed=7),
    "no top-k": Sampling(top_k=0, seed=7),
    "top-p first": Sampling(samplers=("top_p", "top_k", "temperature"), top_p=0.9, seed=7),
    "mirostat": Sampling(mirostat=2, seed=7),
    "end": Sampling(ignore_eos=True, seed=7),
    "large": Sampling(top_k=5000, seed=7),
}


@pytest.fixture
def backend(open_model: Callable[..., Loaded]) -> LlamaBackend:
    return open_model("tiny-hybrid").backend


def reply(backend: LlamaBackend, sampling: Sampling, n: int = 60) -> list[int]:
    backend.clear(0)
    backend.evaluate(0, as_tokens(range(40)), 0)
    sampler = backend.sampler(sampling, as_tokens(range(40)))
    found = []
    for position in range(40, 40 + n):
        found.append(sampler.sample(0))
        backend.evaluate(0, as_tokens(found[-1:]), position)
    sampler.close()
    return found


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The k of each call from now on."""
    calls: list[int] = []
    real = sampler_module.sample_best

    def sample_best(chain: int, ctx: int, index: int, k: int) -> int:
        calls.append(k)
        return real(chain, ctx, index, k)

    monkeypatch.setattr(sampler_module, "sample_best", sample_best)
    return calls


@pytest.mark.parametrize("name", FAST)
def test_the_best_tokens_are_enough(backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls = counted(monkeypatch)
    found = reply(backend, FAST[name])
    assert calls == [FAST[name].top_k] * 60
    monkeypatch.setattr(sampler_module, "_n_best", lambda sampling: 0)
    assert reply(backend, FAST[name]) == found
    assert len(calls) == 60


@pytest.mark.parametrize("name", SLOW)
def test_other_chains_see_all_tokens(backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls = counted(monkeypatch)
    reply(backend, SLOW[name], 5)
    assert calls == []


def test_ties_and_what_is_no_number(backend: LlamaBackend) -> None:
    """The lower id wins a tie; what is no number is no token, and without any number the library is asked."""
    backend.clear(0)
    backend.evaluate(0, as_tokens(range(40)), 0)
    logits = np.ctypeslib.as_array(
        sampler_module.api.llama_get_logits_ith(backend._ctx, 39), (backend.tokenizer.n_vocab,)
    )
    greedy = backend.sampler(Sampling(temperature=0.0), as_tokens([1]))
    for ids, expected in (([200, 7, 150], 7), ([281, 130], 130)):
        logits[:] = 0.0
        logits[ids] = 5.0
        assert greedy.sample(0) == expected
    logits[:] = np.nan
    logits[77] = -3.0
    assert greedy.sample(0) == 77
    logits[:] = -np.inf
    logits[9] = 0.0
    assert greedy.sample(0) == 9
    logits[:] = np.nan
    assert 0 <= greedy.sample(0) < logits.size
    greedy.close()
