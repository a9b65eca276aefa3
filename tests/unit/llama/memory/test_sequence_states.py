"""The states of each kind of memory: their sizes, their saved bytes, and the bytes to load."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyctl.cache.snapshot import NOTHING, State
from pyctl.llama.memory.sequence_states import (
    AttentionStates,
    OpaqueStates,
    RecurrentStates,
    WindowedStates,
    states_of,
)

HEAD = 64 + 8
"""Bytes of a windowed state without rows: a header, and a recurrent part."""

ROW = 6
"""Bytes of a row of two planes, as LAYOUT has them."""

LAYOUT = "rows=0:4x1, window=0:2x1,1:4x1, state=8"
WINDOW = 16
N_PLANES = 2


class FakeKV:
    """A context whose states are the numbers of their bytes."""

    layout = LAYOUT

    def __init__(self, kind: str, window: int = 0) -> None:
        self.kind = kind
        self.window = (window, 2 * window)
        self.n = 0
        self.saved: list[tuple[int, int, int]] = []

    def n_tokens(self, seq: int) -> int:
        return self.n

    def state_size(self, seq: int) -> int:
        if self.kind == "opaque":
            return 10 * self.n
        return HEAD + ROW * min(self.n, self.window[0])

    def save_state(self, seq: int, n: int, out: np.ndarray) -> None:
        assert out.size in (HEAD, self.state_size(seq))
        out[:] = n

    def save_window(self, seq: int, first: int, last: int, out: np.ndarray) -> None:
        self.saved.append((seq, first, last))
        out[:] = last


def states(kind: str, window: int = 0, n: int = 0) -> tuple[Any, FakeKV]:
    """Return the states of a context of this ``kind``, whose sequence 0 has ``n`` tokens."""
    kv = FakeKV(kind, window)
    kv.n = n
    return states_of(kv, N_PLANES), kv  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "window", "expected", "fixed_bytes", "n_state_history"),
    [
        ("attention", 0, AttentionStates, 0, 0),
        ("hybrid", 0, RecurrentStates, HEAD, N_PLANES),
        ("hybrid", WINDOW, WindowedStates, -1, 0),
        ("opaque", 0, OpaqueStates, -1, 0),
        ("opaque", WINDOW, OpaqueStates, -1, 0),
    ],
)
def test_each_kind_has_a_class(
    kind: str, window: int, expected: type, fixed_bytes: int, n_state_history: int
) -> None:
    made, _ = states(kind, window)
    assert type(made) is expected
    assert made.kind == kind
    assert made.fixed_bytes == fixed_bytes
    assert made.n_state_history == n_state_history


def test_attention_saves_and_loads_nothing() -> None:
    made, _ = states("attention", n=30)
    state = made.save(0, 30, NOTHING)
    assert state.n_bytes == 0
    assert made.n_bytes(0, (10, 20)) == 0
    assert made.to_load(state) is None


def test_recurrent_states_have_one_size() -> None:
    made, _ = states("hybrid", n=30)
    state = made.save(0, 30, NOTHING)
    assert made.n_bytes(0) == HEAD == state.n_bytes
    assert made.n_bytes(0, (10, 20, 30)) == 3 * HEAD
    loaded = made.to_load(state)
    assert loaded.block is state.head
    assert loaded.pieces == ()


def test_opaque_states_grow_with_the_tokens() -> None:
    made, kv = states("opaque", n=30)
    state = made.save(0, 30, NOTHING)
    assert state.n_bytes == made.n_bytes(0) == 300
    kv.n = 40
    assert made.n_bytes(0) == 400
    assert made.to_load(state).block is state.head


@pytest.mark.parametrize("kind", ["attention", "hybrid", "opaque"])
def test_a_draft_models_part_is_kept(kind: str) -> None:
    made, _ = states(kind, n=30)
    draft = np.full(5, 7, np.uint8)
    assert made.save(0, 30, draft).draft is draft


def test_neighbouring_windows_share_rows() -> None:
    made, kv = states("hybrid", WINDOW, n=30)
    first = made.save(0, 30, NOTHING)
    kv.n = 34
    assert made.n_bytes(0, (34,)) == HEAD + 4 * ROW
    second = made.save(0, 34, NOTHING)
    assert kv.saved == [(0, 14, 30), (0, 30, 34)]
    assert any(block is first.shared[0] for block in second.shared)
    assert second.recurrent.size == HEAD + WINDOW * ROW


def test_a_window_of_a_short_sequence_has_its_rows_only() -> None:
    made, kv = states("hybrid", WINDOW, n=5)
    assert made.n_bytes(0) == HEAD + 5 * ROW
    state = made.save(0, 5, NOTHING)
    assert kv.saved == [(0, 0, 5)]
    assert state.n_bytes == HEAD + 5 * ROW


def test_a_sequence_that_was_cut_shares_nothing() -> None:
    made, kv = states("hybrid", WINDOW, n=30)
    made.save(0, 30, NOTHING)
    made.forget(0)
    made.save(0, 30, NOTHING)
    assert kv.saved == [(0, 14, 30), (0, 14, 30)]


def test_a_loaded_window_is_shared_with_the_next_state() -> None:
    made, kv = states("hybrid", WINDOW, n=30)
    state = made.save(0, 30, NOTHING)
    made.forget(0)
    loaded = made.to_load(state)
    assert loaded.block is state.head
    assert [(piece.first, piece.last) for piece in loaded.pieces] == [(14, 30)]
    made.keep(0, state)
    kv.n = 32
    made.save(0, 32, NOTHING)
    assert kv.saved == [(0, 14, 30), (0, 30, 32)]


def test_a_windowed_state_from_a_file_is_one_block() -> None:
    made, _ = states("hybrid", WINDOW, n=30)
    block = np.zeros(HEAD + WINDOW * ROW, np.uint8)
    loaded = made.to_load(State.from_parts(block))
    assert loaded.block is block
    assert loaded.pieces == ()
