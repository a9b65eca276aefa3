"""The model whose tokens depend on every stored byte."""

from __future__ import annotations

import numpy as np
import pytest

from bench.simulate.model import DigestModel, Weights, cold_reply
from pyctl.cache.snapshot import Rows, State
from pyctl.errors import StateError
from pyctl.prompt import as_tokens

TOKENS = as_tokens(np.arange(100) + 2_000)


def model_of(weights: Weights) -> DigestModel:
    return DigestModel(weights, 512, 2, 64, 0, lambda n, is_decode: None, lambda: None)


def logits_of(model: DigestModel, seq: int = 0) -> bytes:
    """Return the output after one more token, which depends on all rows and on the state."""
    model.evaluate(seq, as_tokens([7]), 100)
    return model.output().tobytes()


def prefill(model: DigestModel, *ends: int, seq: int = 0) -> None:
    start = 0
    for end in ends:
        model.evaluate(seq, TOKENS[start:end], start)
        start = end


@pytest.mark.parametrize("is_hybrid", [True, False])
def test_batches_change_nothing_unless_the_model_rounds(is_hybrid: bool) -> None:
    whole = cold_reply(Weights(1, is_hybrid, rounds=False), TOKENS, [100], 8)
    assert cold_reply(Weights(1, is_hybrid, rounds=False), TOKENS, [30, 64, 100], 8) == whole
    rounding = Weights(1, is_hybrid, rounds=True)
    assert cold_reply(rounding, TOKENS, [100], 8) != cold_reply(rounding, TOKENS, [50, 100], 8)
    assert cold_reply(Weights(2, is_hybrid, rounds=False), TOKENS, [100], 8) != whole


@pytest.mark.parametrize("is_hybrid", [True, False])
def test_what_is_saved_and_restored_continues_to_the_bit(is_hybrid: bool) -> None:
    model = model_of(Weights(1, is_hybrid, rounds=False))
    prefill(model, 50, 100)
    rows = model.save_rows(0, 0, 100)
    state = model.save_state(0, 100)
    model.restore(1, 0, [(rows, 0, 100)], state)
    assert logits_of(model, 1) == logits_of(model, 0)


def changed_row(rows: Rows, state: State) -> None:
    rows.block[8 * 51] ^= 1


def changed_state(rows: Rows, state: State) -> None:
    state.recurrent[0] ^= 1


def rows_moved_by_one(rows: Rows, state: State) -> None:
    rows.block[8:] = np.roll(rows.block[8:], 8)


@pytest.mark.parametrize("change", [changed_row, changed_state, rows_moved_by_one])
def test_any_other_byte_changes_the_output(change: object) -> None:
    model = model_of(Weights(1, is_hybrid=True, rounds=False))
    prefill(model, 50, 100)
    rows = model.save_rows(0, 0, 100)
    state = model.save_state(0, 100)
    model.synchronize()
    change(rows, state)  # type: ignore[operator]
    model.restore(1, 0, [(rows, 0, 100)], state)
    assert logits_of(model, 1) != logits_of(model, 0)


def test_blocks_are_zeros_until_the_copies_are_complete() -> None:
    model = model_of(Weights(1, is_hybrid=True, rounds=False))
    prefill(model, 50)
    block = model.save_rows(0, 0, 50).block
    assert not block.any()
    assert model.block_bytes().in_flight == block.nbytes
    model.synchronize()
    assert block.any()


def test_held_rows_outlive_their_sequence_and_free_cells_do_not() -> None:
    model = model_of(Weights(1, is_hybrid=False, rounds=False))
    prefill(model, 50, 100)
    held = model.save_rows(0, 0, 100, hold=True)
    model.clear(0)
    model.restore(1, 0, [(held, 0, 100)], None)
    prefill(model, 50, 100)
    assert logits_of(model, 1) == logits_of(model, 0)
    assert held.held is not None
    model.release(held.held)
    model.clear(1)
    with pytest.raises(StateError):
        model.fetch(held.held, 0, 100)


def test_rows_that_a_block_lacks_are_refused() -> None:
    model = model_of(Weights(1, is_hybrid=False, rounds=False))
    prefill(model, 50)
    rows = model.save_rows(0, 10, 50)
    with pytest.raises(StateError, match="not in the block"):
        model.restore(1, 0, [(rows, 0, 40)], None)
