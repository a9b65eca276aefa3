"""The mirror: when a draft model follows the evaluations of its trunk, and when its blocks are
saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyctl.cache.snapshot import NOTHING, Block
from pyctl.engine.backend import SequenceTokens
from pyctl.errors import ModelError
from pyctl.llama.draft.draft_mirror import DraftMirror
from pyctl.llama.draft.draft_model import SIGNATURE_BYTES


class Rows:
    """Hidden rows of a trunk whose evaluations are numbered from 1: a row is the number."""

    def __init__(self, *, can_copy: bool = True) -> None:
        self.can_copy = can_copy
        self.n_evaluated = 0
        self.copies: list[NDArray[np.float32]] = []

    def rows(self, n: int) -> NDArray[np.float32]:
        return np.full((n, 1), self.n_evaluated, np.float32)

    def start(self, n: int) -> bool:
        if self.can_copy:
            self.copies.append(np.full((n, 1), self.n_evaluated + 1, np.float32))
        return self.can_copy

    def finish(self, before: bool = False) -> NDArray[np.float32]:
        return self.copies[-2 if before else -1]


class Model:
    """A draft model that remembers what it was called for."""

    def __init__(self, layers: tuple[int, ...] = (-1,)) -> None:
        self.layers = layers
        self.calls: list[Any] = []

    def follow(
        self, seq: int, tokens: Sequence[int], start: int, hidden: NDArray[np.float32] | None
    ) -> None:
        rows = None if hidden is None else hidden[:, 0].astype(int).tolist()
        self.calls.append((seq, tuple(tokens), start, rows))

    def state_size(self, seq: int) -> int:
        return SIGNATURE_BYTES + 4

    def save_state(self, seq: int, n: int, out: Block | None = None) -> Block:
        self.calls.append(("save", seq, n))
        block = np.zeros(self.state_size(seq), np.uint8) if out is None else out
        block[:] = 1
        return block

    def close(self) -> None:
        self.calls.append("close")


class Trunk:
    """A mirror of a model, and the evaluations that a backend makes around it."""

    def __init__(self, layers: tuple[int, ...] = (-1,), *, can_copy: bool = True) -> None:
        self.model: Any = Model(layers)
        self.rows: Any = Rows(can_copy=can_copy)
        self.mirror = DraftMirror(self.model, 0, lambda ctx, layers: self.rows)

    def evaluate(self, *items: SequenceTokens) -> None:
        self.mirror.pass_on_rows()
        self.mirror.evaluated(items, sum(len(item.tokens) for item in items))
        self.rows.n_evaluated += 1


FIRST = SequenceTokens(0, (5, 6), 0, 2)
SECOND = SequenceTokens(0, (7,), 2)
OTHER = SequenceTokens(1, (8,), 0)


@pytest.fixture
def trunk() -> Trunk:
    return Trunk()


def test_an_evaluation_is_passed_on_after_the_start_of_the_next(trunk: Trunk) -> None:
    trunk.evaluate(FIRST)
    assert trunk.model.calls == []
    trunk.evaluate(SECOND)
    assert trunk.model.calls == [(0, (5, 6), 0, [1, 1])]
    assert trunk.mirror.settled() is trunk.model
    assert trunk.model.calls[1:] == [(0, (7,), 2, [2])]


def test_rows_that_cannot_be_copied_are_passed_on_before_the_next_evaluation() -> None:
    trunk = Trunk(can_copy=False)
    trunk.evaluate(FIRST)
    trunk.mirror.pass_on_rows()
    assert trunk.model.calls == [(0, (5, 6), 0, [1, 1])]


def test_each_sequence_gets_its_own_rows(trunk: Trunk) -> None:
    trunk.evaluate(FIRST, OTHER)
    trunk.mirror.settled()
    assert trunk.model.calls == [(0, (5, 6), 0, [1, 1]), (1, (8,), 0, [1])]


def test_a_model_that_reads_no_rows_follows_the_tokens() -> None:
    trunk = Trunk(())
    trunk.evaluate(FIRST)
    trunk.mirror.settled()
    assert trunk.model.calls == [(0, (5, 6), 0, None)]


def test_tokens_of_a_forgotten_sequence_are_not_passed_on(trunk: Trunk) -> None:
    trunk.evaluate(FIRST, OTHER)
    trunk.mirror.forget(0)
    trunk.mirror.settled()
    assert trunk.model.calls == [(1, (8,), 0, [1])]


def test_a_save_that_would_wait_for_the_device_is_made_at_the_next_use(trunk: Trunk) -> None:
    trunk.evaluate(FIRST)
    block = trunk.mirror.save_state(0, 2)
    assert not block[:SIGNATURE_BYTES].any(), "it is unsigned"
    assert trunk.model.calls == []
    trunk.mirror.settled()
    assert trunk.model.calls == [(0, (5, 6), 0, [1, 1]), ("save", 0, 2)]
    assert block.all()


def test_a_pending_save_comes_before_its_sequence_is_forgotten(trunk: Trunk) -> None:
    trunk.evaluate(FIRST)
    block = trunk.mirror.save_state(0, 2)
    trunk.mirror.forget(0)
    assert block.all()


def test_without_pending_evaluations_a_save_is_made_at_once(trunk: Trunk) -> None:
    trunk.evaluate(FIRST)
    trunk.mirror.settled()
    assert trunk.mirror.save_state(0, 2).all()


def test_without_a_model_there_is_nothing_to_pass_on() -> None:
    mirror = DraftMirror(None, 0)
    mirror.pass_on_rows()
    mirror.evaluated([FIRST], 2)
    assert mirror.settled() is None
    assert mirror.save_state(0, 2) is NOTHING
    mirror.close()


def test_a_model_whose_rows_llama_cpp_does_not_give_is_closed() -> None:
    def refuse(ctx: int, layers: Sequence[int]) -> Any:
        raise ModelError("no such layer")

    model: Any = Model()
    with pytest.raises(ModelError, match="no such layer"):
        DraftMirror(model, 0, refuse)
    assert model.calls == ["close"]
