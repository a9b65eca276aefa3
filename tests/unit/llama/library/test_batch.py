"""Batches for llama_decode: the tokens, positions and outputs that they hold."""

from __future__ import annotations

import numpy as np
import pytest

from pyctl.engine.backend import SequenceTokens
from pyctl.llama.library.batch import Batch, Outputs, RowBatch
from pyctl.prompt import as_tokens


def outputs_of(batch: Batch) -> list[int]:
    return np.flatnonzero(batch.outputs[: batch.struct.n_tokens]).tolist()


def test_tokens_of_several_sequences_follow_each_other() -> None:
    batch = Batch(8)
    n = batch.put(0, 3, [7, 8], 10)
    n = batch.put(n, 5, [9], 40)
    assert n == batch.struct.n_tokens == 3
    assert batch.tokens[:3].tolist() == [7, 8, 9]
    assert batch.positions[:3].tolist() == [10, 11, 40]
    assert batch.seqs[:3].tolist() == [3, 3, 5]
    assert outputs_of(batch) == [1, 2]


def test_llama_cpp_reads_the_arrays_themselves() -> None:
    batch = Batch(4)
    batch.put(0, 2, [7, 8], 10)
    struct = batch.struct
    assert [struct.token[i] for i in range(2)] == [7, 8]
    assert [struct.pos[i] for i in range(2)] == [10, 11]
    assert [struct.n_seq_id[i] for i in range(2)] == [1, 1]
    assert [struct.seq_id[i][0] for i in range(2)] == [2, 2]
    assert [struct.logits[i] for i in range(2)] == [0, 1]


@pytest.mark.parametrize(
    ("options", "places"),
    [({}, [2]), ({"last": False}, []), ({"every": True}, [0, 1, 2])],
)
def test_a_filled_batch_has_outputs_of_the_last_token_or_of_every_or_of_none(
    options: dict[str, bool], places: list[int]
) -> None:
    batch = Batch(4)
    batch.put(0, 0, [1, 1, 1, 1], 0, n_outputs=4)
    batch.fill(1, as_tokens([4, 5, 6]), 20, **options)
    assert outputs_of(batch) == places
    assert batch.struct.n_tokens == 3


def test_the_last_sure_token_and_its_drafts_have_outputs() -> None:
    batch = Batch(16)
    items = [SequenceTokens(0, (1, 2, 3, 4), 10, 2), SequenceTokens(1, (5,), 30)]
    n, places = batch.fill_all(items)
    assert n == 5
    assert places == [1, 2, 3, 4]
    assert outputs_of(batch) == places


def test_rows_of_an_image_have_a_position_a_line_and_a_column() -> None:
    batch = RowBatch(8, 2)
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    batch.fill(3, rows, 100, 1, 3, last=True)
    struct = batch.struct
    sections = np.array([struct.pos[i] for i in range(16)]).reshape(4, 4)
    assert sections[0].tolist() == [100] * 4
    assert sections[1].tolist() == [100, 100, 101, 101]
    assert sections[2].tolist() == [101, 102, 100, 101]
    assert sections[3].tolist() == [0] * 4
    assert [struct.logits[i] for i in range(4)] == [0, 0, 0, 1]
    assert [struct.embd[i] for i in range(8)] == list(range(8))


def test_rows_of_text_have_their_position_in_each_section_and_no_output() -> None:
    batch = RowBatch(4, 2)
    batch.fill_text(0, np.ones((2, 2), np.float32), 7)
    struct = batch.struct
    assert [struct.pos[i] for i in range(8)] == [7, 8, 7, 8, 7, 8, 0, 0]
    assert [struct.logits[i] for i in range(2)] == [0, 0]


def test_a_recalled_output_is_the_only_one_until_the_next_evaluation() -> None:
    outputs = Outputs(None, 3)
    logits = np.array([1, 2, 3], np.float32)
    outputs.recall(logits)
    assert outputs.is_recalled
    assert outputs.row(0).tolist() == [1, 2, 3]
    outputs.set([4, 9])
    assert not outputs.is_recalled
    assert outputs.batch_index(1) == 9
