"""The most likely tokens, found without filling all candidates."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pyctl.llama.sampling.grammar import Candidates
from pyctl.prompt import as_tokens

N_VOCAB = 5000
N_GROUPS = 78  # which leave 8 tokens over


def best(logits: NDArray[np.float32], n: int, also: list[int]) -> NDArray[np.int32]:
    """Return the ids of `Candidates.fill_best`, whose logits are those of ``logits``."""
    candidates = Candidates(N_VOCAB)
    candidates.fill_best(logits, N_GROUPS, n, as_tokens(also))
    ids = candidates.remaining["id"].copy()
    assert np.array_equal(candidates.remaining["logit"], logits[ids], equal_nan=True)
    return ids


@pytest.mark.parametrize(
    "kind", ["normal", "equal", "best are last", "best are left over", "many equal", "masked"]
)
def test_all_of_the_most_likely_tokens_are_there_once_and_in_order(kind: str) -> None:
    """Each candidate comes once, by rising id, and no token that is left out is more likely than
    the n-th best, also with ties, masked tokens and the best at the end of the vocabulary.
    """
    rng = np.random.default_rng(1)
    logits = {
        "normal": rng.normal(size=N_VOCAB),
        "equal": np.zeros(N_VOCAB),
        "best are last": np.arange(N_VOCAB, dtype=float),
        "best are left over": np.where(
            np.arange(N_VOCAB) < N_VOCAB - 8, rng.normal(size=N_VOCAB), 9.0
        ),
        "many equal": np.round(rng.normal(size=N_VOCAB)),
        "masked": np.where(rng.random(N_VOCAB) < 0.999, -np.inf, 1.0),
    }[kind].astype(np.float32)
    for n, also in ((1, []), (20, []), (41, [0, 7, N_VOCAB - 1]), (N_GROUPS - 1, [])):
        ids = best(logits, n, also)
        assert np.all(np.diff(ids) > 0)
        assert set(also) <= set(ids.tolist())
        left_out = np.delete(logits, ids)
        bound = np.sort(logits)[-n]
        assert not np.any(left_out > bound), (kind, n)
        assert np.sum(logits[ids] >= bound) >= n


def test_few_tokens_are_filled_in_where_few_are_likely() -> None:
    logits = np.random.default_rng(2).normal(size=N_VOCAB).astype(np.float32)
    assert best(logits, 20, []).size < 40


def test_a_nan_hides_no_other_token() -> None:
    logits = np.arange(N_VOCAB, dtype=np.float32)
    logits[: N_VOCAB // 2] = np.nan
    ids = best(logits, 20, [])
    assert set(range(N_VOCAB - 20, N_VOCAB)) <= set(ids.tolist())
