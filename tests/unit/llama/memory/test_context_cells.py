"""The cells of a context: rows that are held, also when the context is closed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyctl.errors import OutOfCellsError, StateError
from pyctl.llama.library import native
from pyctl.llama.memory.context_cells import ContextCells, DeviceRows, handle_of
from tests.unit.cache.fake_rows import FakeHeldRows

N_CELLS = 100
ROW = 3


class FakeKV:
    """A context that holds the rows of two sequences of 10 and 20 tokens."""

    def __init__(self, *, can_hold: bool = True) -> None:
        self.can_hold = can_hold
        self.held: dict[int, tuple[int, int]] = {}
        self.n_free = 42

    @property
    def n_held(self) -> int:
        return sum(last - first for first, last in self.held.values())

    def n_tokens(self, seq: int) -> int:
        return (10, 20)[seq]

    def position(self, seq: int, n: int) -> int:
        return n - 1

    def reserve(self, n: int, in_parts: bool) -> None:
        if n * (1 + in_parts) > self.n_free:
            raise native.OutOfCells  # type: ignore[attr-defined]

    def rows_size(self, first: int, last: int) -> int:
        return ROW * (last - first)

    def hold(self, seq: int, first: int, last: int) -> int:
        if last > self.n_tokens(seq):
            raise ValueError("no such rows")
        handle = len(self.held) + 1
        self.held[handle] = first, last
        return handle

    def release(self, handle: int) -> None:
        del self.held[handle]

    def fetch(self, handle: int, first: int, last: int, out: np.ndarray) -> None:
        out[:] = handle

    def n_own(self, handle: int, first: int, last: int) -> int:
        return last - first


def opened(kv: Any) -> ContextCells:
    cells = ContextCells()
    cells.open(kv, N_CELLS, n_seqs=2)
    return cells


def test_held_rows_have_their_size() -> None:
    kv = FakeKV()
    cells = opened(kv)
    held = cells.hold_rows(0, 2, 9)
    assert held.n_cells == 7
    assert held.n_bytes == 7 * ROW
    assert cells.n_held_cells == 7
    assert cells.n_exclusive_cells(held, 2, 9) == 7
    assert cells.fetch(held, 4, 6).tolist() == [held.handle] * 2 * ROW


def test_rows_that_are_not_there_are_not_held() -> None:
    cells = opened(FakeKV())
    with pytest.raises(StateError, match="no such rows"):
        cells.hold_rows(0, 5, 11)


def test_a_second_release_is_harmless() -> None:
    kv = FakeKV()
    cells = opened(kv)
    held = cells.hold_rows(0, 0, 5)
    cells.release(held)
    cells.release(held)
    assert kv.held == {}


def test_all_are_released() -> None:
    kv = FakeKV()
    cells = opened(kv)
    cells.hold_rows(0, 0, 5)
    cells.hold_rows(1, 0, 5)
    cells.release_all()
    assert kv.held == {}


def test_rows_of_a_closed_context_are_gone() -> None:
    kv = FakeKV()
    cells = opened(kv)
    held = cells.hold_rows(0, 0, 5)
    cells.close()
    cells.release(held)
    assert kv.held, "a lost device is not called"
    assert cells.n_held_cells == 0
    with pytest.raises(StateError, match="the device of these rows is lost"):
        cells.fetch(held, 0, 5)


def test_a_new_context_does_not_release_rows_of_the_old_one() -> None:
    cells = opened(FakeKV())
    held = cells.hold_rows(0, 0, 5)
    other = FakeKV()
    cells.open(other, N_CELLS, n_seqs=2)  # type: ignore[arg-type]
    other.held[held.handle] = 0, 5
    cells.release(held)
    assert other.held


@pytest.mark.parametrize(("can_hold", "n_free"), [(True, 42), (False, N_CELLS - 30)])
def test_free_cells(can_hold: bool, n_free: int) -> None:
    assert opened(FakeKV(can_hold=can_hold)).n_free == n_free


def test_too_few_cells_for_a_batch() -> None:
    cells = opened(FakeKV())
    cells.reserve(30)
    with pytest.raises(OutOfCellsError):
        cells.reserve(30, in_parts=True)


def test_a_memory_without_a_context_has_no_images_and_reserves_nothing() -> None:
    cells = ContextCells()
    cells.reserve(10**6)
    assert cells.position(0, 7) == 7
    assert opened(FakeKV()).position(0, 7) == 6


def test_rows_of_another_memory_are_refused() -> None:
    with pytest.raises(StateError, match="already held"):
        handle_of(FakeHeldRows(1, 1))
    assert handle_of(DeviceRows(3, 1, 1)) == 3
