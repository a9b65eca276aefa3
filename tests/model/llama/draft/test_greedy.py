"""The most likely token at each place of a draft: a token below a probability, or outside of the
trunk's vocabulary, counts as none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

from pyctl.llama.draft.greedy import N_BEST, Greedy
from pyctl.llama.draft.separate_model import SeparateModel
from tests.model.llama.draft.separate import (
    N_VOCAB,
    PROMPT,
    N,
    PlainModel,
    feed,
    guess,
)

TEXT = PROMPT[:20]


@pytest.fixture
def ctx(model_path: Callable[[str], Path]) -> Iterator[Any]:
    """Yield a context that can have an output at each token, as those of block models."""
    path = str(model_path("tiny-dense")).encode()
    model = api.llama_model_load_from_file(path, api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx = 256
    params.n_ubatch = 64
    params.n_threads = 1
    ctx = api.llama_init_from_model(model, params)
    yield ctx
    api.llama_free(ctx)
    api.llama_model_free(model)


def evaluate(ctx: Any, greedy: Greedy, n_outputs: int = len(TEXT)) -> list[int]:
    """Evaluate TEXT from an empty context; return the choices at its last ``n_outputs`` tokens."""
    api.llama_memory_clear(api.llama_get_memory(ctx), True)
    n = greedy.put(0, 0, TEXT, 0, n_outputs=n_outputs)
    assert greedy.decode(n) == 0
    return [greedy.choose(i) for i in range(n - n_outputs, n)]


def logits_of(ctx: Any) -> NDArray[np.float32]:
    """Return the logits of the last evaluation, shape (len(TEXT), N_VOCAB)."""
    return np.ctypeslib.as_array(api.llama_get_logits(ctx), (len(TEXT), N_VOCAB)).copy()


def test_each_place_has_its_likeliest_token(ctx: Any) -> None:
    choices = evaluate(ctx, Greedy(ctx, N_VOCAB))
    assert choices == logits_of(ctx).argmax(axis=1).tolist()
    assert len(set(choices)) > 3, "one token everywhere would prove nothing"


def test_sampling_on_the_device_chooses_the_same(ctx: Any) -> None:
    """A device may sample in place of a copy of all logits. The drafts do not depend on it, and a
    closed batch leaves no sampler in the context.
    """
    expected = evaluate(ctx, Greedy(ctx, N_VOCAB))
    greedy = Greedy(ctx, N_VOCAB)
    greedy.sample_on_device()
    assert evaluate(ctx, greedy, n_outputs=1) == expected[-1:]
    greedy.close()
    assert evaluate(ctx, Greedy(ctx, N_VOCAB)) == expected
    assert logits_of(ctx).argmax(axis=1).tolist() == expected


def test_a_token_below_the_probability_is_none(ctx: Any) -> None:
    """The probability is that among the N_BEST likeliest tokens, as in llama-server."""
    expected = evaluate(ctx, Greedy(ctx, N_VOCAB))
    best = np.sort(logits_of(ctx).astype(np.float64), axis=1)[:, -N_BEST:]
    probabilities = 1 / np.exp(best - best[:, -1:]).sum(axis=1)
    lower, upper = np.sort(probabilities)[len(TEXT) // 2 :][:2]
    is_likely = probabilities >= upper
    choices = evaluate(ctx, Greedy(ctx, N_VOCAB, p_min=(lower + upper) / 2))
    assert choices == np.where(is_likely, expected, -1).tolist()
    assert 0 < is_likely.sum() < len(TEXT)


def test_a_token_outside_of_the_vocabulary_of_the_trunk_is_none(ctx: Any) -> None:
    expected = evaluate(ctx, Greedy(ctx, N_VOCAB))
    n_vocab = max(expected)
    choices = evaluate(ctx, Greedy(ctx, n_vocab))
    assert choices == [token if token < n_vocab else -1 for token in expected]


def test_drafts_with_a_least_probability_end_where_it_is_less(
    open_separate: Callable[..., SeparateModel], reference: PlainModel
) -> None:
    lengths = []
    for p_min in (0.0, 1e-9, 0.5, 1.1):
        model = open_separate(p_min=p_min)
        feed(model, PROMPT)
        draft = guess(model, PROMPT, 80)
        reference.check([*PROMPT, 80], draft, len(draft))
        lengths.append(len(draft))
    assert lengths[:2] == [N, N]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0


def test_tokens_that_the_other_model_does_not_have_are_not_drafted(
    open_separate: Callable[..., SeparateModel],
) -> None:
    model = open_separate()
    feed(model, PROMPT)
    draft = guess(model, PROMPT, 80)
    smaller = open_separate(n_vocab=max(draft))
    feed(smaller, PROMPT)
    assert guess(smaller, PROMPT, 80) == draft[: draft.index(max(draft))]
