"""Rollbacks of drafts: by a cut, by planes, by a mark, and each once."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.engine.backend import SequenceTokens
from pyctl.llama.memory.rollbacks import PLAIN_STEPS, Rollbacks

N_UBATCH = 32


class FakeKV:
    """A context that records cuts and marks."""

    def __init__(self, *, has_marks: bool = False, can_cut: bool = True) -> None:
        self.has_marks = has_marks
        self.can_cut = can_cut
        self.cuts: list[tuple[int, int]] = []
        self.marks: dict[int, int] = {}
        self.history: list[bool] = []

    def keep_history(self, keeps: bool) -> None:
        self.history.append(keeps)

    def cut(self, seq: int, n: int) -> bool:
        self.cuts.append((seq, n))
        return self.can_cut

    def mark(self, seq: int, n: int) -> None:
        self.marks[seq] = n

    def reset(self, seq: int) -> int:
        return self.marks[seq]


def item(n_drafts: int, position: int = 10, seq: int = 0) -> SequenceTokens:
    """Return one sure token at ``position`` and ``n_drafts`` drafts."""
    return SequenceTokens(seq, (5,) * (1 + n_drafts), position)


def rollbacks(kv: Any, n_state_history: int = 0) -> Rollbacks:
    made = Rollbacks(kv, n_state_history=n_state_history, n_ubatch=N_UBATCH)
    made.n_ctx = 100
    return made


def test_a_memory_without_a_context_takes_nothing_back() -> None:
    closed = Rollbacks()
    closed.record()
    assert closed.n_rollback == 0
    assert closed.max_drafts == 0
    assert closed.mark([item(3)]) == {0: -1}


@pytest.mark.parametrize("n", [11, 12, 13])
def test_rows_are_cut_anywhere_after_the_sure_token(n: int) -> None:
    kv = FakeKV()
    rows = rollbacks(kv)
    rows.can_cut = True
    assert rows.n_rollback == rows.max_drafts == 100
    rows.record([item(3)], {0: -1})
    assert rows.roll_back(0, n, end=14) == n
    assert kv.cuts == [(0, n)]


def test_the_sure_token_stays() -> None:
    rows = rollbacks(FakeKV())
    rows.can_cut = True
    rows.record([item(3)], {0: -1})
    assert rows.roll_back(0, 10, end=14) is None


def test_all_tokens_stay_without_a_call() -> None:
    kv = FakeKV()
    rows = rollbacks(kv)
    assert rows.roll_back(0, 14, end=14) == 14
    assert kv.cuts == []


@pytest.mark.parametrize(("n", "n_kept"), [(11, None), (12, 12), (13, 13)])
def test_planes_reach_as_far_as_there_are(n: int, n_kept: int | None) -> None:
    planes = rollbacks(FakeKV(), n_state_history=2)
    assert planes.n_rollback == 2
    planes.record([item(3)], {0: -1})
    assert planes.roll_back(0, n, end=14) == n_kept


def test_planes_need_items_of_one_length() -> None:
    planes = rollbacks(FakeKV(), n_state_history=2)
    planes.record([item(3), item(1, seq=1)], {0: -1, 1: -1})
    assert planes.roll_back(0, 13, end=14) is None


def test_a_rollback_is_possible_once() -> None:
    planes = rollbacks(FakeKV(), n_state_history=2)
    planes.record([item(3)], {0: -1})
    assert planes.roll_back(0, 13, end=14) == 13
    assert planes.roll_back(0, 12, end=13) is None


@pytest.mark.parametrize("ends_by", ["forget", "record"])
def test_a_change_of_the_sequence_ends_it(ends_by: str) -> None:
    planes = rollbacks(FakeKV(), n_state_history=2)
    planes.record([item(3)], {0: -1})
    if ends_by == "forget":
        planes.forget(0)
    else:
        planes.record()
    assert planes.roll_back(0, 13, end=14) is None


def test_only_drafts_beyond_the_planes_need_a_mark() -> None:
    kv = FakeKV(has_marks=True)
    marked = rollbacks(kv, n_state_history=2)
    assert marked.max_drafts == N_UBATCH - 1
    assert marked.mark([item(2), item(3, position=20, seq=1)]) == {0: -1, 1: 21}
    assert kv.marks == {1: 20}


def test_a_mark_goes_back_to_the_start() -> None:
    marked = rollbacks(FakeKV(has_marks=True), n_state_history=2)
    items = [item(8)]
    marked.record(items, marked.mark(items))
    assert marked.roll_back(0, 12, end=19) == 10


def test_a_mark_serves_where_llama_cpp_refuses_the_cut() -> None:
    marked = rollbacks(FakeKV(has_marks=True, can_cut=False), n_state_history=2)
    items = [item(8)]
    marked.record(items, marked.mark(items))
    assert marked.roll_back(0, 18, end=19) == 10


def plain_steps(planes: Rollbacks, n: int) -> None:
    """Evaluate ``n`` steps without drafts."""
    for _ in range(n):
        planes.mark([item(0)])
        planes.record()


def test_plain_steps_write_no_planes_once_drafts_are_rare() -> None:
    kv = FakeKV()
    planes = rollbacks(kv, n_state_history=3)
    plain_steps(planes, PLAIN_STEPS)
    assert kv.history == []
    planes.mark([item(0), item(0, seq=1)])
    assert kv.history == [False]
    planes.record()
    assert kv.history == [False, True]


@pytest.mark.parametrize(
    "step",
    [[item(2)], [item(0), item(2, seq=1)], [SequenceTokens(0, (5, 5), 10, 2)]],
    ids=["drafts", "drafts of another", "sure tokens"],
)
def test_a_step_of_more_tokens_writes_planes(step: list[SequenceTokens]) -> None:
    kv = FakeKV()
    planes = rollbacks(kv, n_state_history=3)
    plain_steps(planes, PLAIN_STEPS + 1)
    kv.history.clear()
    planes.mark(step)
    assert kv.history == []
    plain_steps(planes, PLAIN_STEPS)
    assert kv.history == []


def test_a_failed_plain_step_does_not_keep_the_next_draft_from_its_planes() -> None:
    kv = FakeKV()
    planes = rollbacks(kv, n_state_history=3)
    plain_steps(planes, PLAIN_STEPS)
    planes.mark([item(0)])  # and no record: the evaluation failed
    planes.mark([item(2)])
    assert kv.history == [False, True]


def test_a_memory_without_planes_is_not_asked_for_them() -> None:
    kv = FakeKV()
    rows = rollbacks(kv)
    plain_steps(rows, PLAIN_STEPS + 1)
    assert kv.history == []
