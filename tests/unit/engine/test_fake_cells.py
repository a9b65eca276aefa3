"""The fake backend's cells with held rows, against a plain account of which sequence has which rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.cache.snapshot import Block, Held, Rows
from pyctl.errors import OutOfCellsError, StateError
from pyctl.prompt import as_tokens
from tests.effort import examples
from tests.fake import FakeBackend

N_CELLS = 96
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["evaluate", "evaluate", "hold", "hold", "release", "cut", "load", "load", "fetch"]),
        st.integers(0, 2),
        st.integers(0, 40),
        st.integers(0, 40),
    ),
    max_size=60,
)


def rows_of(backend: FakeBackend, seq: int) -> list[bytes]:
    return backend._seqs[seq].rows


def bytes_of(backend: FakeBackend, block: Block) -> bytes:
    backend.synchronize()
    return block[-16:].tobytes()


@settings(max_examples=examples(200), deadline=None)
@given(actions=ACTIONS)
def test_held_rows_are_there_until_they_are_released(actions: list[tuple[str, int, int, int]]) -> None:
    backend = FakeBackend("attention", n_ctx=N_CELLS, n_seqs=3)
    held: list[tuple[Held, int, list[bytes]]] = []
    expected: list[list[bytes]] = [[], [], []]
    for action, seq, a, b in actions:
        own, n_free = expected[seq], backend.n_free
        if action == "evaluate" and a:
            tokens = as_tokens(np.arange(a) + 60 * b)
            if a > n_free or len(own) + a > N_CELLS:
                if a > n_free:
                    with pytest.raises(OutOfCellsError):
                        backend.evaluate(seq, tokens, len(own))
            else:
                backend.evaluate(seq, tokens, len(own))
                expected[seq] = own + rows_of(backend, seq)[len(own) :]
                assert backend.n_free == n_free - a
        elif action == "hold" and own:
            first, last = sorted((a % (len(own) + 1), b % (len(own) + 1)))
            if first < last:
                held.append((backend.hold(seq, first, last), first, own[first:last]))
                assert backend.n_free == n_free, "what a sequence has counts once"
        elif action == "release" and held:
            gone, first, rows = held.pop(a % len(held))
            n_own = backend.n_own(gone, first, first + len(rows))
            backend.release(gone)
            backend.release(gone)
            assert backend.n_free == n_free + n_own
            with pytest.raises(StateError):
                backend.fetch(gone, first, first + 1)
        elif action == "cut":
            n = a % (len(own) + 1)
            backend.rewind(seq, n)
            expected[seq] = own[:n]
        elif action == "load" and held:
            source, first, rows = held[a % len(held)]
            backend.rewind(seq, min(first, len(own)))
            expected[seq] = own = own[: min(first, len(own))]
            last = first + 1 + b % len(rows)
            if len(own) == first:
                n_free, n_new = backend.n_free, last - first - backend.n_own(source, first, last)
                try:
                    backend.restore(seq, first, [(Rows(source), first, last)])
                except OutOfCellsError:
                    assert n_new > n_free
                else:
                    expected[seq] = own + rows[: last - first]
                    assert n_new >= n_free - backend.n_free, "held rows take no further cells"
        elif action == "fetch" and held:
            source, first, rows = held[a % len(held)]
            assert bytes_of(backend, backend.fetch(source, first, first + len(rows))) == rows[-1]
        for seq in range(3):
            assert rows_of(backend, seq) == expected[seq]
        cells = [cell for each in backend._seqs for cell in each.cells]
        assert len(cells) == len(set(cells))
        taken = set(cells).union(*(each.cells for each, _, _ in held))
        assert backend.n_free == N_CELLS - len(taken)
    for each, first, rows in held:
        backend.synchronize()
        assert backend.fetch(each, first, first + len(rows)).nbytes == each.n_bytes


def test_a_sequence_has_the_lowest_cells_whatever_is_held() -> None:
    """So a request alone yields what it yields in an empty context."""
    backend = FakeBackend(n_ctx=64)
    backend.evaluate(0, as_tokens(range(40)), 0)
    before = rows_of(backend, 0)
    held = backend.hold(0, 0, 40)
    backend.clear(0)
    backend.evaluate(0, as_tokens(range(24)), 0)
    assert backend._seqs[0].cells == list(range(24))
    backend.clear(0)
    backend.restore(0, 0, [(Rows(held), 0, 40)])
    assert backend._seqs[0].cells == list(range(40))
    assert rows_of(backend, 0) == before


def test_nothing_is_held_after_the_model_was_freed() -> None:
    backend = FakeBackend(n_ctx=64)
    backend.evaluate(0, as_tokens(range(8)), 0)
    held = backend.hold(0, 0, 8)
    backend.unload()
    backend.load()
    backend.release(held)
    assert backend.n_free == 64
    with pytest.raises(StateError):
        backend.fetch(held, 0, 8)
