"""Rows of draft heads: whatever a sequence has been through, they are those of its tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pyctl.engine.backend import SequenceTokens
from pyctl.errors import UnavailableError
from pyctl.llama.draft.head_rows import MAX_SPARE, DraftSequence
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import load
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import as_tokens
from tests.model.llama.draft.drafting import (
    HYBRIDS,
    UBATCH,
    LateRows,
    prefill,
    prompt,
)

WIDTH = 3


def rows_of(*tokens: int) -> NDArray[np.float32]:
    """Return a hidden row for each of ``tokens``, shape (len(tokens), WIDTH)."""
    return np.repeat(np.array(tokens, np.float32)[:, None], WIDTH, axis=1)


def test_a_sequence_has_the_rows_of_its_tokens_and_of_the_one_before() -> None:
    """A head computes row p from token p and the trunk's row before it, so the row before the first
    pending token stays available; before the first token of all it is zero.
    """
    sequence = DraftSequence(WIDTH)
    sequence.append([1, 2, 3], rows_of(1, 2, 3))
    assert sequence.n_pending == sequence.end == 3
    assert np.array_equal(sequence.hidden(3), rows_of(0, 1, 2, 3))
    sequence.append([4], rows_of(4))
    assert sequence.tokens == [1, 2, 3, 4]
    assert np.array_equal(sequence.hidden(1), rows_of(3, 4))


@pytest.mark.parametrize("n_dropped", [1, 3])
def test_dropped_tokens_take_their_rows_along(n_dropped: int) -> None:
    sequence = DraftSequence(WIDTH)
    sequence.append([1, 2, 3, 4], rows_of(1, 2, 3, 4))
    sequence.drop(n_dropped)
    sequence.append([9], rows_of(9))
    assert sequence.tokens == [*range(1, 5 - n_dropped), 9]
    assert np.array_equal(sequence.hidden(1), rows_of(4 - n_dropped, 9))
    assert sequence.end == 5 - n_dropped


def test_without_its_tokens_a_sequence_has_no_known_row() -> None:
    """Tokens that were forgotten cannot be dropped one by one: what remains is an unknown row, and
    no state is saved from it.
    """
    sequence = DraftSequence(WIDTH)
    tokens = list(range(1, 2 * MAX_SPARE))
    sequence.append(tokens, rows_of(*tokens))
    sequence.forget_all_but(2)
    assert sequence.tokens == tokens[-2:]
    assert np.array_equal(sequence.hidden(2), rows_of(*tokens[-3:]))
    assert sequence.is_known
    sequence.drop(5)
    assert sequence.end == len(tokens) - 5
    assert not sequence.is_known
    assert not sequence.hidden(0).any()


def test_a_few_spare_rows_are_kept() -> None:
    """Forgetting copies the rows, so it waits until MAX_SPARE rows are superfluous."""
    sequence = DraftSequence(WIDTH)
    tokens = list(range(1, MAX_SPARE + 1))
    sequence.append(tokens, rows_of(*tokens))
    sequence.forget_all_but(1)
    assert sequence.tokens == tokens
    sequence.forget_all_but(0)
    assert sequence.tokens == []
    assert np.array_equal(sequence.hidden(0), rows_of(tokens[-1]))


class Walk:
    """A sequence to which everything happens that can; ``tokens`` are what it holds."""

    def __init__(self, backend: LlamaBackend, seed: int) -> None:
        self.backend = backend
        self.random = random.Random(seed)
        self.tokens = [
            self.random.randrange(200) for _ in range(self.random.choice((1, 3, 40, 100)))
        ]
        prefill(backend, self.tokens)

    def some(self, n: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(200) for _ in range(n))

    def step(self) -> None:
        self.random.choice(
            (self.draft, self.draft, self.plain, self.batch, self.resume, self.waste, self.other)
        )()
        assert self.backend.memory.cells.n_tokens(0) == len(self.tokens)

    def draft(self) -> None:
        sure = self.some(self.random.choice((1, 1, 1, 2)))
        made = self.backend.draft([SequenceTokens(0, sure, len(self.tokens))], 3)[0]
        assert len(made) == 3
        n_drafts = 4 - len(sure)
        self.backend.decode(
            [SequenceTokens(0, (*sure, *made[:n_drafts]), len(self.tokens), len(sure))]
        )
        self.tokens += (*sure, *made[: self.random.randrange(n_drafts + 1)])
        self.backend.memory.rollback(0, len(self.tokens))

    def plain(self) -> None:
        for token in self.some(self.random.choice((1, 5, 20))):
            self.backend.decode([SequenceTokens(0, (token,), len(self.tokens))])
            self.tokens.append(token)

    def batch(self) -> None:
        new = self.some(self.random.choice((1, 2, 4, 5, 33, UBATCH)))
        self.backend.evaluate(0, as_tokens(new), len(self.tokens), output=False)
        self.tokens += new

    def resume(self) -> None:
        """Saved, and loaded in two parts; the first of them may still be there."""
        n = len(self.tokens)
        rows = self.backend.memory.save_rows(0, 0, n)
        state = self.backend.memory.save_state(0, n)
        self.backend.memory.synchronize()
        first = self.random.randrange(n)
        if self.random.random() < 0.5 or first == 0:
            self.backend.memory.clear(0)
            first = 0
        else:
            self.backend.memory.rewind(0, first)
        at = self.random.randrange(first, n + 1)
        for begin, end in ((first, at), (at, n)):
            if begin < end:
                self.backend.memory.restore(0, begin, [(rows, begin, end)])
        self.backend.memory.restore(0, n, (), state)

    def waste(self) -> None:
        """A draft whose tokens never come to be evaluated."""
        self.backend.draft([SequenceTokens(0, self.some(1), len(self.tokens))], 2)

    def other(self) -> None:
        """Another sequence passes by."""
        prefill(self.backend, list(self.some(self.random.choice((4, 70)))), 1)
        self.backend.memory.clear(1)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("as_on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("shape", HYBRIDS)
def test_rows_are_those_of_the_tokens_whatever_has_happened(
    open_head: Callable[..., LlamaBackend], shape: str, seed: int, as_on_gpu: bool
) -> None:
    """After a random walk of drafts, batches, restores and other sequences the head's rows are
    those of a cold run of the same tokens, within the rounding of other batches.
    """
    backend = open_head(shape, as_on_gpu=as_on_gpu)
    walk = Walk(backend, seed)
    for _ in range(25):
        if len(walk.tokens) > 1800:
            break
        walk.step()
    n = len(walk.tokens)

    def rows() -> NDArray[np.float32]:
        block = backend.memory.save_rows(0, 0, n).draft
        backend.memory.synchronize()
        assert block.size == backend.memory.shape.sizes.draft_rows(0, n)
        return block[128:].view(np.float16).astype(np.float32)

    found = rows()
    state = backend.memory.save_state(0, n).draft
    backend.memory.clear(0)
    prefill(backend, walk.tokens)
    cold = rows()
    assert np.abs(cold).max() > 1.0
    if "moe" in shape:  # what is nearly as likely another expert's is so in the model, too
        assert np.mean(np.abs(found - cold) > 0.1) < 0.1
        return
    assert np.abs(found - cold).max() < 0.1
    assert (
        np.abs(
            state[64:].view(np.float32)
            - backend.memory.save_state(0, n).draft[64:].view(np.float32)
        ).max()
        < 0.1
    )


def test_a_missing_part_costs_drafts_only(open_head: Callable[..., LlamaBackend]) -> None:
    """The head knows nothing of what came before, as after the file of a sequence was loaded."""
    backend = open_head()
    tokens = prompt(128)
    prefill(backend, tokens)
    backend.memory.drafts.settled().clear(0)  # type: ignore[union-attr]
    assert len(backend.draft([SequenceTokens(0, (4,), 128)], 3)[0]) == 3
    assert backend.memory.save_rows(0, 0, 128).draft.size == 0
    backend.decode([SequenceTokens(0, (4, 5, 6, 7), 128)])
    backend.memory.rollback(0, 130)
    assert len(backend.draft([SequenceTokens(0, (4,), 130)], 3)[0]) == 3


def test_what_is_being_saved_outlives_its_sequence(open_head: Callable[..., LlamaBackend]) -> None:
    backend = open_head(as_on_gpu=True)
    tokens = prompt(64)
    prefill(backend, tokens)
    rows = backend.memory.save_rows(0, 0, 64).draft
    state = backend.memory.save_state(0, 64).draft
    backend.memory.clear(0)
    backend.memory.synchronize()
    prefill(backend, tokens)
    again = backend.memory.save_rows(0, 0, 64).draft
    backend.memory.synchronize()
    assert np.array_equal(rows, again)
    assert state[:64].any()


def test_an_interrupted_head_holds_up_nothing(model_path: Callable[[str], Path]) -> None:
    """Earlier rows can be saved, and sequences can be cleared; only drafts are missing."""
    settings = ModelSettings(
        path=str(model_path("tiny-hybrid-nextn")), n_ctx=512, n_ubatch=UBATCH, n_threads=1
    )
    backend = load(settings, drafts=DraftSettings(draft_types=("draft-mtp",))).backend
    tokens = prompt(100)
    prefill(backend, tokens)
    backend.memory.drafts.hidden = LateRows(backend.memory.drafts.hidden)  # type: ignore[assignment, arg-type]
    backend.evaluate(0, as_tokens([5, 6, 7]), 100)
    state = backend.memory.save_state(0, 103)
    rows = backend.memory.save_rows(0, 0, 103).draft
    backend.control.interrupt()
    backend.memory.synchronize()
    assert state.recurrent.size > 0
    assert not rows[:64].any()  # no signature: the rows of the last tokens were never evaluated
    assert backend.draft([SequenceTokens(0, (4,), 103)], 3) == [()]
    with pytest.raises(UnavailableError):
        backend.decode([SequenceTokens(0, (4,), 103)])
    backend.memory.clear(0)
    backend.unload()
