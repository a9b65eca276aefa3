"""Which rows of windows are saved, which blocks neighbouring states share, and that states come
back whole.
"""

from __future__ import annotations

import numpy as np
import pytest

from pyctl.cache.snapshot import Block, State
from pyctl.llama.memory.shared_windows import SharedWindows, WindowForm, WindowRows

WINDOW = 16
LAYOUTS = {
    "rows": (
        "hybrid ext=0 transposed=0 k=1:9x1, v=, window=16/64 ext=0 transposed=0 "
        "k=1:4x1,1:6x1, v=1:4x1,1:6x1,"
    ),
    "transposed": (
        "hybrid ext=1 transposed=1 k=1:9x1, v=1:2x4, window=16/64 ext=0 transposed=1 "
        "k=8:34x1, v=1:2x3,"
    ),
    "recurrent": (
        "hybrid ext=0 transposed=0 k=1:9x1, v=, window=16/64 ext=0 transposed=0 k=1:4x1, "
        "v=1:4x1, state=10,7,"
    ),
}
SIZES = {"rows": (64, 20), "transposed": (64, 40), "recurrent": (81, 8)}
"""Bytes of the head and of a row, by layout."""


class Sequence:
    """A made-up sequence: the block of its state at any position, and rows, which arrive at the
    next look.
    """

    def __init__(self, layout: str = "rows", seed: int = 1) -> None:
        self.form = WindowForm.from_layout(LAYOUTS[layout])
        self.windows = SharedWindows(self.form)
        random = np.random.default_rng(seed)
        self.rows = [
            random.integers(0, 256, (runs, 100, row)).astype(np.uint8)
            for runs, row in self.form.planes
        ]
        self.head = random.integers(0, 256, self.form.head).astype(np.uint8)
        self.copied: list[tuple[int, int]] = []
        self.coming: list[tuple[int, int, Block]] = []

    def block(self, n: int) -> Block:
        """Return the state at ``n``."""
        return np.concatenate(
            [self.head, *(plane[:, max(n - WINDOW, 0) : n].ravel() for plane in self.rows)]
        )

    def copy(self, first: int, last: int, block: Block) -> None:
        """Begin to copy rows [first, last)."""
        self.copied.append((first, last))
        self.coming.append((first, last, block))

    def arrive(self) -> None:
        """Complete all copies."""
        for first, last, block in self.coming:
            np.concatenate([plane[:, first:last].ravel() for plane in self.rows], out=block)
        self.coming.clear()

    def state(self, n: int, seq: int = 0) -> State:
        """Return the state at ``n``; it has to be the same again in one block."""
        window = self.windows.save(seq, max(n - WINDOW, 0), n, self.copy)
        state = State.from_parts(self.head, window=window)
        self.arrive()
        assert (state.recurrent == self.block(n)).all()
        assert state.n_bytes == self.form.head + sum(block.nbytes for block in window.blocks)
        return state


def ranges(state: State) -> list[tuple[int, int]]:
    """Return the ranges of the rows of the state's blocks, whether they count or not."""
    assert isinstance(state.window, WindowRows)
    form = state.window.form
    return [(piece.last - form.n_rows(piece.block), piece.last) for piece in state.window.pieces]


def shared(one: State, two: State) -> list[tuple[int, int]]:
    """Return the ranges of the blocks that both have."""
    return [
        at
        for block, at in zip(two.shared, ranges(two), strict=True)
        if any(block is each for each in one.shared)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_is_kept_once_for_all_states_that_see_it(layout: str) -> None:
    made = Sequence(layout)
    head, row_bytes = SIZES[layout]
    assert made.form.head == head
    assert made.form.row_bytes == row_bytes
    first, second, third, far = (made.state(n) for n in (10, 14, 27, 60))
    assert [ranges(each) for each in (first, second, third, far)] == [
        [(0, 10)],
        [(0, 10), (10, 14)],
        [(10, 14), (14, 27)],  # of the block at the edge one row is not seen
        [(44, 60)],
    ]
    assert shared(first, second) == [(0, 10)]
    assert shared(second, third) == [(10, 14)]
    assert not shared(third, far)
    assert made.copied == [(0, 10), (10, 14), (14, 27), (44, 60)]


def test_rows_are_shared_before_they_arrive() -> None:
    made = Sequence()
    windows = [made.windows.save(0, max(n - WINDOW, 0), n, made.copy) for n in (12, 20, 24)]
    assert [len(window.blocks) for window in windows] == [1, 2, 3]
    assert made.copied == [(0, 12), (12, 20), (20, 24)]
    made.arrive()
    for n, window in zip((12, 20, 24), windows, strict=True):
        assert (window.joined(made.head) == made.block(n)).all()


def test_a_state_again_keeps_nothing_more() -> None:
    made = Sequence()
    one = made.state(40)
    two = made.state(40)
    assert shared(one, two) == ranges(two) == [(24, 40)]
    assert len(made.copied) == 1


def test_rows_whose_states_are_gone_are_kept_anew() -> None:
    made = Sequence()
    states = {n: made.state(n) for n in (30, 34, 38)}
    del states[34], states[38]
    kept = made.state(40)
    assert ranges(kept) == [(14, 30), (30, 40)]
    assert shared(states[30], kept) == [(14, 30)]
    del states, kept
    assert ranges(made.state(42)) == [(26, 42)]


def test_a_gap_between_blocks_that_live_is_filled() -> None:
    made = Sequence()
    before = made.state(20)
    between = made.state(24)
    after = made.state(28).shared[-1]
    del between
    state = made.state(29)
    assert ranges(state) == [(4, 20), (20, 24), (24, 28), (28, 29)]
    assert state.shared[0] is before.shared[0]
    assert state.shared[2] is after


def test_nothing_is_shared_with_rows_that_were_cut() -> None:
    made = Sequence()
    first = made.state(20)
    made.windows.forget(0)
    assert not shared(first, made.state(22))


def test_a_loaded_state_is_shared_with_what_follows() -> None:
    made = Sequence()
    first = made.state(20)
    made.state(30)
    made.windows.forget(0)
    assert isinstance(first.window, WindowRows)
    made.windows.record_loaded(0, first.window)
    assert shared(first, made.state(25)) == [(4, 20)]


def test_sequences_share_nothing_by_themselves() -> None:
    made = Sequence()
    assert not shared(made.state(20), made.state(20, seq=1))


def test_rows_that_could_not_be_copied_are_nobodys() -> None:
    made = Sequence()
    first = made.state(20)

    def refused(start: int, end: int, block: Block) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        made.windows.save(0, 8, 24, refused)
    again = made.state(26)
    assert ranges(again) == [(4, 20), (20, 26)]
    assert shared(first, again) == [(4, 20)]
