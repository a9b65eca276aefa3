"""Sampling from the most likely tokens alone chooses the same token as sampling from all."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from llama_cpp import llama_cpp as api

from pyctl.engine.backend import SequenceTokens
from pyctl.engine.sampling import Sampling
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import load
from pyctl.llama.sampling import sampler
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import as_tokens
from tools.generator import TINY_HYBRID, cached_model


@pytest.fixture
def read_all(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """read_all() -> samplers read every logit from then on."""
    return lambda: monkeypatch.setattr(sampler, "n_best", lambda _: 0)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    """Yield a model with so many tokens that a few of them are fewer."""
    shape = replace(TINY_HYBRID, name="tiny-hybrid-20k", vocab_size=20_000)
    path = cached_model(shape, tmp_path_factory.mktemp("models"))
    loaded = load(
        ModelSettings(path=str(path), n_ctx=1024, n_threads=1),
        drafts=DraftSettings(draft_types=("cache",)),
    )
    yield loaded.backend
    loaded.backend.unload()


def tokens(backend: LlamaBackend, sampling: Sampling, n: int = 60) -> list[int]:
    prompt = as_tokens(list(range(100, 160)))
    backend.memory.clear(0)
    backend.evaluate(0, prompt, 0)
    chooser = backend.sampler(sampling, prompt)
    found = []
    for position in range(prompt.size, prompt.size + n):
        found.append(chooser.sample(0))
        backend.evaluate(0, as_tokens(found[-1:]), position)
    chooser.close()
    return found


BASE = Sampling(seed=7, ignore_eos=False)
EVEN = tuple((token, -math.inf) for token in range(0, 20_000, 2))


@pytest.mark.parametrize(
    ("sampling", "n_best"),
    [
        (replace(BASE, temperature=0.0), 1),
        (replace(BASE, temperature=0.0, top_k=5, top_p=0.5, min_p=0.2), 1),
        (replace(BASE, temperature=0.0, presence_penalty=2.0, top_k=20), 84),
        (replace(BASE, temperature=3.0), 40),
        (replace(BASE, temperature=3.0, top_k=20, top_p=0.8, min_p=0.0), 20),
        (replace(BASE, temperature=3.0, top_k=300), 300),
        (replace(BASE, temperature=3.0, top_k=8, repeat_penalty=1.5, repeat_last_n=32), 40),
        (replace(BASE, temperature=3.0, xtc_probability=0.5, typical_p=0.9), 40),
        (replace(BASE, temperature=3.0, grammar="root ::= [a-z]+", grammar_kind="gbnf"), 40),
        (replace(BASE, temperature=0.0, grammar="root ::= [a-z]+", grammar_kind="gbnf"), 1),
        (replace(BASE, temperature=0.0, ignore_eos=True, logit_bias=EVEN), 1),
        (
            replace(
                BASE,
                temperature=0.0,
                logit_bias=tuple((token, 1.0 + token % 5) for token in range(200)),
            ),
            1,
        ),
        (replace(BASE, temperature=3.0, ignore_eos=True, logit_bias=((5, 3.0), (7, -2.0))), 40),
        (replace(BASE, temperature=3.0, logit_bias=EVEN[:150]), 40),
        (replace(BASE, temperature=3.0, repeat_penalty=1.5, repeat_last_n=32, logit_bias=EVEN), 72),
    ],
)
def test_the_same_tokens_are_chosen(
    backend: LlamaBackend, read_all: Callable[[], None], sampling: Sampling, n_best: int
) -> None:
    assert sampler.n_best(sampling) == n_best
    found = tokens(backend, sampling)
    read_all()
    assert found == tokens(backend, sampling)
    assert len(set(found)) > 5


@pytest.mark.parametrize(
    "sampling",
    [
        replace(BASE, temperature=1.0, repeat_penalty=0.5),
        replace(BASE, temperature=1.0, presence_penalty=-1.0),
        replace(BASE, temperature=0.0, top_k=0, xtc_probability=0.5),
        replace(BASE, temperature=0.0, repeat_penalty=1.1, repeat_last_n=-1),
        replace(BASE, temperature=0.0, dry_multiplier=1.0),
        replace(BASE, temperature=1.0, samplers=("top_p", "top_k")),
        replace(BASE, temperature=1.0, top_k=0),
    ],
)
def test_where_any_token_may_win_all_are_looked_at(sampling: Sampling) -> None:
    assert sampler.n_best(sampling) == 0


def test_a_bias_leaves_all_but_a_few_tokens_unread(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    monkeypatch.setattr(sampler.Candidates, "fill", lambda *_: read.append(0))
    for temperature, n_distinct in ((0.0, 1), (3.0, 5)):
        found = tokens(
            backend,
            replace(BASE, temperature=temperature, ignore_eos=True, logit_bias=((7, 1.0),)),
            30,
        )
        assert len(set(found)) >= n_distinct
    assert not read


N_DRAFTS = 40


def of_one_evaluation(backend: LlamaBackend, sampling: Sampling, kind: str) -> list[int]:
    """Return the tokens sampled from the outputs of a long draft, whose logits are changed to a
    ``kind`` first.
    """
    prompt = as_tokens(list(range(100, 160)))
    backend.memory.clear(0)
    backend.evaluate(0, prompt, 0)
    chooser = backend.sampler(sampling, prompt)
    found = [chooser.sample(0)]
    backend.decode([SequenceTokens(0, tuple(range(300, 301 + N_DRAFTS)), prompt.size)])
    outputs = backend.outputs
    rng = np.random.default_rng(3)
    for index in range(1 + N_DRAFTS):
        row = outputs.row(index)
        at = ctypes.addressof(api.llama_get_logits_ith(backend.ctx, index).contents)
        assert at == row.ctypes.data, "rows lie one behind the other, in the order of the batch"
        row *= 20.0
        if kind == "ties":
            np.round(row, out=row)
        elif kind == "masked":
            row[rng.random(row.size) < 0.99] = -np.inf
    found += [chooser.sample(index) for index in range(1 + N_DRAFTS)]
    chooser.close()
    return found


@pytest.mark.parametrize("kind", ["as they are", "ties", "masked"])
@pytest.mark.parametrize(
    "sampling",
    [
        replace(BASE, temperature=0.0),
        replace(BASE, temperature=0.0, ignore_eos=True, logit_bias=EVEN),
        replace(BASE, temperature=3.0),
        replace(BASE, temperature=3.0, ignore_eos=True, logit_bias=((5, 3.0), (7, -2.0))),
        replace(BASE, temperature=3.0, top_k=8, repeat_penalty=1.5, repeat_last_n=32),
        replace(BASE, temperature=3.0, grammar="root ::= [a-z]+", grammar_kind="gbnf"),
        replace(BASE, temperature=3.0, top_k=0),
    ],
)
def test_the_same_tokens_are_chosen_of_the_outputs_of_a_long_draft(
    backend: LlamaBackend, read_all: Callable[[], None], sampling: Sampling, kind: str
) -> None:
    found = of_one_evaluation(backend, sampling, kind)
    assert len(set(found)) > 5
    if sampling == replace(BASE, temperature=0.0):
        assert found[1:] == [
            int(backend.outputs.row(index).argmax()) for index in range(1 + N_DRAFTS)
        ]
    if kind != "ties":
        read_all()
        assert found == of_one_evaluation(backend, sampling, kind)


def test_outputs_are_those_of_the_last_evaluation(backend: LlamaBackend) -> None:
    backend.memory.clear(0)
    backend.evaluate(0, as_tokens(list(range(100, 160))), 0)
    kept = backend.logits(0)
    backend.evaluate(0, as_tokens([7]), 60, output=False)
    with pytest.raises(IndexError):
        backend.logits(0)
    backend.recall(kept.view(np.uint8))
    assert np.array_equal(backend.logits(0), kept)
    chooser = backend.sampler(replace(BASE, temperature=0.0), as_tokens([1]))
    assert chooser.sample(0) == kept.argmax()
    backend.evaluate(0, as_tokens([8]), 61)
    assert chooser.sample(0) == backend.logits(0).argmax()
    chooser.close()
