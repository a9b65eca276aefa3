"""The record of a live sequence: which tokens it has, and which of them are a cold run's."""

from __future__ import annotations

import numpy as np
import pytest

from pyctl.cache.sequence import LiveSequence
from pyctl.prompt import as_tokens


@pytest.fixture
def seq() -> LiveSequence:
    """Return a sequence with a batch of ten tokens of a prompt."""
    sequence = LiveSequence(id=0, capacity=100)
    sequence.append(as_tokens(range(10)), exact=True)
    return sequence


def test_no_row_is_exact_after_one_that_is_not(seq: LiveSequence) -> None:
    assert seq.n_exact == 10
    seq.append(as_tokens([10, 11]), exact=False)
    seq.append(as_tokens([12, 13]), exact=True)
    assert seq.n_exact == 10
    assert seq.tokens.tolist() == list(range(14))


def test_a_cut_leaves_whole_batches_only(seq: LiveSequence) -> None:
    seq.append(as_tokens(range(10, 20)), exact=True)
    seq.truncate(15)
    assert seq.n == 15
    assert seq.n_exact == 10
    seq.truncate(9)
    assert seq.n == 9
    assert seq.n_exact == 0


def test_beside_other_sequences_no_batch_is_exact() -> None:
    sequence = LiveSequence(id=0, capacity=100, shares=True)
    sequence.append(as_tokens(range(10)), exact=True)
    assert sequence.n_exact == 0
    sequence.reset(as_tokens(range(10)), ends=[10])
    assert sequence.n_exact == 0


def test_a_reply_is_no_part_of_the_prompt(seq: LiveSequence) -> None:
    for token in (50, 51, 52):
        seq.append_one(token)
    assert seq.n == 13
    assert seq.n_prompt == 10
    assert seq.n_exact == 10
    seq.truncate(12)
    assert seq.n_prompt == 10
    seq.append(as_tokens([60]), exact=True)
    assert seq.n_prompt == 13, "the next message follows the reply"
    assert seq.n_exact == 10


def test_shared_tokens_are_counted_to_the_first_difference(seq: LiveSequence) -> None:
    other = np.array([0, 1, 2, 9], np.int32)
    assert seq.shared(other) == 3
    assert seq.shared(as_tokens(range(50))) == 10
