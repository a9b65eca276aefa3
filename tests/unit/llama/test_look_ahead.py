"""Several outputs read at once: the same is found, no more is read than is likely to be needed, and no thread reads
logits after the call."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyctl.llama import outputs as module
from pyctl.llama.grammar import Candidates
from pyctl.llama.outputs import FEW, MANY, Outputs, read_by, row_threads
from pyctl.llama.sampler import _n_groups
from pyctl.prompt import as_tokens

Rows = NDArray[np.float32]
N_OUTPUTS = 45
N_THREADS = 4


@pytest.fixture
def outputs_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outputs]:
    """outputs_of(rows, n_threads) -> the outputs of an evaluation that has left these rows."""
    monkeypatch.setattr(
        module.api, "llama_get_logits", lambda rows: rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    )

    def get(rows: Rows, n_threads: int = N_THREADS) -> Outputs:
        outputs = Outputs(rows, rows.shape[1], n_threads)
        outputs.set(range(len(rows)))
        return outputs

    return get


def logits(kind: str, n_vocab: int) -> Rows:
    rng = np.random.default_rng(n_vocab)
    rows = rng.normal(size=(N_OUTPUTS, n_vocab)).astype(np.float32)
    drawn = rng.random(rows.shape)
    if kind == "ties":
        rows = np.round(rows)
    elif kind == "equal":
        rows[:] = 0.0
    elif kind == "nan":
        rows[drawn < 0.001] = np.nan
    elif kind == "only nan":
        rows[:] = np.nan
    elif kind == "masked":
        rows[drawn < 0.999] = -np.inf
    elif kind == "infinite":
        rows[drawn < 0.001] = np.inf
    return rows


def found(outputs: Outputs, n_best: int, biased: Sequence[int] = ()) -> list[Any]:
    """What a sampler gets of each output."""
    n_groups, candidates, each = _n_groups(outputs.n_vocab, n_best), Candidates(outputs.n_vocab), []
    for index in range(N_OUTPUTS):
        if n_best == 1:
            each.append(outputs.likeliest(index))
        elif n_groups:
            candidates.fill_best(outputs.row(index), outputs.maxima(index, n_groups), n_best, as_tokens(biased))
            each.append(candidates.left.tobytes())
        else:
            candidates.fill(outputs.row(index))
            each.append(candidates.left.tobytes())
    return each


@pytest.mark.parametrize("n_vocab", [40, 16_384, 20_011])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "nan", "only nan", "masked", "infinite"])
def test_the_same_is_found_with_and_without_threads(
    outputs_of: Callable[..., Outputs], kind: str, n_vocab: int
) -> None:
    rows = logits(kind, n_vocab)
    for n_best, biased in ((1, ()), (20, ()), (41, (0, 7, n_vocab - 1)), (150, ())):
        alone = found(outputs_of(rows, 1), n_best, biased)
        assert alone == found(outputs_of(rows), n_best, biased)
    assert found(outputs_of(rows), 1) == [int(row.argmax()) for row in rows]


def test_several_requests_of_one_evaluation_look_for_different_things(outputs_of: Callable[..., Outputs]) -> None:
    rows = logits("normal", 16_384)
    outputs, alone = outputs_of(rows), outputs_of(rows, 1)
    for index in range(N_OUTPUTS):
        n_groups = (512, 600)[index % 2]
        assert np.array_equal(outputs.maxima(index, n_groups), alone.maxima(index, n_groups))
        assert outputs.likeliest(index) == alone.likeliest(index)
    assert outputs.likeliest(3) == alone.likeliest(3)  # again


def n_ahead(outputs: Outputs, rows: Rows, n_needed: int) -> int:
    """How many outputs behind the first ones have been read: they do not notice that ``rows`` change."""
    before = rows.argmax(axis=1)
    rows[:] = 0.0
    rows[np.arange(len(rows)), before - 1] = 1.0
    unread = (index for index in range(n_needed, len(rows)) if outputs.likeliest(index) != before[index])
    return next(unread, len(rows)) - n_needed


@pytest.mark.parametrize("n_needed", [1, 3, 4, 5, 9, 40])
def test_no_more_rows_are_read_ahead_than_were_needed_before(outputs_of: Callable[..., Outputs], n_needed: int) -> None:
    rows = logits("normal", 16_384)
    outputs = outputs_of(rows)
    for index in range(n_needed):
        outputs.likeliest(index)
    assert n_ahead(outputs, rows, n_needed) <= min(max(n_needed, N_THREADS - n_needed), MANY * N_THREADS)


@pytest.mark.parametrize(("n_rows", "n_threads"), [(FEW - 1, N_THREADS), (N_OUTPUTS, 1)])
def test_few_outputs_are_read_one_at_a_time(outputs_of: Callable[..., Outputs], n_rows: int, n_threads: int) -> None:
    rows = logits("normal", 16_384)[:n_rows]
    outputs = outputs_of(rows, n_threads)
    outputs.likeliest(0)
    assert n_ahead(outputs, rows, 1) == 0


def test_the_next_evaluation_may_write_at_once(outputs_of: Callable[..., Outputs]) -> None:
    first, second = logits("normal", 16_384), logits("ties", 16_384)
    buffer = first.copy()
    outputs = outputs_of(buffer)
    for _ in range(20):
        for rows in (first, second):
            buffer[:] = rows
            outputs.set(range(N_OUTPUTS))
            kept = [(outputs.likeliest(index), outputs.maxima(index, 512)) for index in range(N_OUTPUTS - 9)]
            buffer[:] = np.nan
            for row, (token, maxima) in zip(rows, kept, strict=False):
                assert token == row.argmax()
                assert np.array_equal(maxima, row.reshape(512, -1).max(axis=1))


@pytest.mark.parametrize("n_failing", [1, 3, 8])
def test_an_error_waits_for_all_threads(n_failing: int) -> None:
    together, lock, ended = threading.Barrier(N_THREADS), threading.Lock(), []
    threads = row_threads(N_THREADS)
    assert threads is not None

    def read(rows: Rows) -> list[int]:
        together.wait(60)  # all threads are reading
        number = int(rows[0, 0])
        try:
            if number < n_failing:
                raise MemoryError(f"row {number}")
            time.sleep(0.05)
            return [number]
        finally:
            with lock:
                ended.append(number)

    rows = np.arange(8, dtype=np.float32)[:, None]
    with pytest.raises(MemoryError, match="row"):
        read_by(threads, 8, read, rows)
    assert sorted(ended) == list(range(8))
    assert read_by(threads, 8, lambda rows: rows[:, 0].tolist(), rows) == list(range(8))


@pytest.mark.parametrize("n_started", [0, 2])
def test_a_system_without_more_threads_reads_alone(
    monkeypatch: pytest.MonkeyPatch, outputs_of: Callable[..., Outputs], n_started: int
) -> None:
    start, left = threading.Thread.start, [None] * n_started

    def refused(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    n_threads = 10 + n_started  # threads of their own
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        assert row_threads(n_threads) is None
    rows = logits("normal", 16_384)
    assert found(outputs_of(rows, n_threads), 1) == [int(row.argmax()) for row in rows]


def test_an_output_that_is_not_there_is_refused(outputs_of: Callable[..., Outputs]) -> None:
    outputs = outputs_of(logits("normal", 16_384))
    with pytest.raises(IndexError):
        outputs.likeliest(N_OUTPUTS)
    outputs.set(())
    with pytest.raises(IndexError):
        outputs.row(0)
