"""Places, eviction and bytes of the cache in RAM, on made-up rows."""

from __future__ import annotations

import numpy as np
import pytest

from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import DRAFT, RECURRENT, Block, PromptMatch, Segment, Snapshot, State
from pyctl.prompt import Tokens, as_tokens
from tests.unit.cache.checks import check_invariants
from tests.unit.cache.fake_rows import FakeWindow

STATE = 1000
ROW = 10


def prompt(seed: int, n: int = 400) -> Tokens:
    return as_tokens(np.random.default_rng(seed).integers(0, 1000, n))


def make(tokens: Tokens, n: int, parent: Segment | None = None) -> Snapshot:
    start = parent.end if parent else 0
    segment = Segment(
        start, as_tokens(tokens[start:n]), np.zeros((n - start) * ROW, np.uint8), parent
    )
    return Snapshot(
        PromptMatch(tokens).prefix(n), segment, State.from_parts(np.zeros(STATE, np.uint8))
    )


def put(cache: RamCache, snapshot: Snapshot, *protected: Snapshot) -> bool:
    with cache.locked(*protected):
        return cache.add(snapshot)


def found(cache: RamCache, tokens: Tokens) -> list[int]:
    check_invariants(cache)
    return [snapshot.n for snapshot in cache.lookup(PromptMatch(tokens), tokens.size - 1)]


def test_lookup_returns_every_stored_length_deepest_first() -> None:
    cache = RamCache(8, None)
    tokens = prompt(1)
    parent = None
    for n in (50, 120, 399):
        snapshot = make(tokens, n, parent)
        assert put(cache, snapshot)
        parent = snapshot.segment
    assert found(cache, tokens) == [399, 120, 50]
    assert found(cache, as_tokens(tokens[:399])) == [120, 50]
    assert found(cache, prompt(2)) == []
    other = tokens.copy()
    other[200] += 1
    assert found(cache, as_tokens(other)) == [120, 50]
    assert cache.overlap(PromptMatch(as_tokens(other)))[1] == 200


def test_a_digest_is_no_proof() -> None:
    cache = RamCache(4, None)
    tokens = prompt(1)
    snapshot = make(prompt(2), 100)
    liar = Snapshot(PromptMatch(tokens).prefix(100), snapshot.segment, snapshot.state)
    assert put(cache, liar)
    assert cache.lookup(PromptMatch(tokens), 399) == []


def test_nothing_leaves_for_what_may_be_added() -> None:
    cache = RamCache(1, 2 * (100 * (ROW + 4) + STATE))
    other = make(prompt(2), 100)
    put(cache, make(prompt(1), 100))
    assert cache.may_add(other.prefix, other.n_bytes)
    assert found(cache, prompt(1)) == [100]
    assert put(cache, other)
    assert found(cache, prompt(1)) == []
    assert found(cache, prompt(2)) == [100]
    assert not put(cache, make(prompt(2), 100)), "it is here already"


@pytest.mark.parametrize("n_slots", [0, 3])
def test_what_was_used_of_late_stays(n_slots: int) -> None:
    cache = RamCache(n_slots, 3 * (100 * (ROW + 4) + STATE))
    snapshots = [make(prompt(seed), 100) for seed in range(3)]
    for snapshot in snapshots:
        cache.next_turn()
        put(cache, snapshot)
    cache.next_turn()
    cache.touch(snapshots[0])
    put(cache, make(prompt(7), 100))
    assert snapshots[0] in cache.snapshots()
    assert snapshots[1] not in cache.snapshots()
    for seed in range(8, 12):
        cache.next_turn()
        put(cache, make(prompt(seed), 100))
    assert snapshots[0] not in cache.snapshots(), "one hit does not last for ever"


def test_locked_and_pinned_snapshots_stay() -> None:
    cache = RamCache(2, None)
    first = make(prompt(1), 100)
    second = make(prompt(2), 100)
    put(cache, first)
    put(cache, second)
    assert cache.pin(first.prefix.name, True)
    for seed in range(5, 9):
        assert not put(cache, make(prompt(seed), 100), second)
    assert cache.snapshots() == [first, second]


def test_a_locked_end_of_a_prompt_stays() -> None:
    first, refused, second = (make(prompt(seed), 100) for seed in range(3))
    cache = RamCache(0, first.n_bytes)
    with cache.locked(first, refused):
        assert cache.prompt_ends.add(first, is_wanted=False)
        assert not cache.prompt_ends.add(refused, is_wanted=False)
        assert not put(cache, make(prompt(3), 100)), "the budget holds"
    assert list(cache.prompt_ends) == [first]
    with cache.locked(second):
        assert cache.prompt_ends.add(second, is_wanted=False)
    assert list(cache.prompt_ends) == [second]


@pytest.mark.parametrize("n_slots", [0, 4])
def test_the_middle_of_a_conversation_goes_first(n_slots: int) -> None:
    cache = RamCache(n_slots, 4 * STATE + 340 * (ROW + 4))
    tokens = prompt(1)
    chained = []
    for n in (50, 100, 150, 200):
        chained.append(make(tokens, n, chained[-1].segment if chained else None))
        put(cache, chained[-1])
    put(cache, make(prompt(2), 70))
    assert found(cache, tokens) in ([200, 150, 50], [200, 100, 50])
    put(cache, make(prompt(3), 70))
    assert found(cache, tokens) == [200, 50]


def test_rows_are_counted_once_and_freed_with_their_last_snapshot() -> None:
    """Snapshots that share a prefix are charged for its rows once. The rows stay until the last of
    these snapshots is dropped, and then their memory is freed, not only uncounted.
    """
    cache = RamCache(8, None)
    tokens = prompt(1)
    stem = make(tokens, 200)
    put(cache, stem)
    left = make(tokens, 300, stem.segment)
    right = make(tokens, 350, stem.segment)
    put(cache, left)
    put(cache, right)
    check_invariants(cache)
    assert cache.n_bytes == (200 + 100 + 150) * (ROW + 4) + 3 * STATE
    cache.drop(stem)
    check_invariants(cache)
    assert cache.n_bytes == (200 + 100 + 150) * (ROW + 4) + 2 * STATE
    cache.drop(left)
    cache.drop(right)
    check_invariants(cache)
    assert cache.n_bytes == 0
    assert stem.segment.rows.nbytes == 0, "the memory must go, not only its bytes"


def test_all_blocks_are_counted_and_go_together() -> None:
    cache = RamCache(2, None)
    plain = make(prompt(1), 100)
    parts = {RECURRENT: np.zeros(STATE, np.uint8), DRAFT: np.zeros(70, np.uint8)}
    plain.segment.draft_rows = np.zeros(300, np.uint8)
    snapshot = Snapshot(plain.prefix, plain.segment, State(parts))
    assert put(cache, snapshot)
    check_invariants(cache)
    assert cache.n_bytes == 100 * (ROW + 4) + STATE + 300 + 70
    cache.drop(snapshot)
    assert cache.n_bytes == plain.segment.draft_rows.nbytes == plain.segment.rows.nbytes == 0


def windowed(
    tokens: Tokens, n: int, blocks: tuple[Block, ...], parent: Segment | None = None
) -> Snapshot:
    plain = make(tokens, n, parent)
    return Snapshot(plain.prefix, plain.segment, State(plain.state.parts, FakeWindow(blocks)))


def test_what_states_share_of_windows_is_counted_once_and_goes_with_the_last() -> None:
    """Window parts that two states share are charged once and freed with the second state. A
    protected snapshot keeps its parts after it was dropped, until it is released.
    """
    cache = RamCache(4, None)
    tokens = prompt(1)
    old, both, new = (np.zeros(n, np.uint8) for n in (300, 200, 100))
    first = windowed(tokens, 100, (old, both))
    second = windowed(tokens, 150, (both, new), first.segment)
    rows = 150 * (ROW + 4)
    freed = cache.index.pool.n_freed
    assert put(cache, first)
    assert put(cache, second)
    check_invariants(cache)
    assert cache.n_bytes == rows + 2 * STATE + 600
    assert freed(first) == STATE + 300 + 100, "half of what both need"
    assert freed(second) == 50 * (ROW + 4) + STATE + 100 + 100
    assert cache.index.pool.n_needed([first], [second]) == cache.n_bytes
    cache.protect(second)
    check_invariants(cache)
    cache.drop(first)
    check_invariants(cache)
    assert cache.n_bytes == rows + 2 * STATE + 300
    cache.drop(second)
    check_invariants(cache)
    assert cache.n_bytes == rows + STATE + 300
    cache.release(second)
    assert cache.n_bytes == 0


def test_room_for_a_state_is_that_of_the_rows_that_no_other_has() -> None:
    tokens = prompt(1)
    both = np.zeros(500, np.uint8)
    new = np.zeros(50, np.uint8)
    first = windowed(tokens, 100, (both,))
    cache = RamCache(4, 150 * (ROW + 4) + 2 * STATE + 550)
    assert put(cache, first)
    assert cache.pin(first.prefix.name, True), "what has to stay is counted with its window"
    with cache.locked(first):
        assert put(cache, windowed(tokens, 150, (both, new), first.segment))
    assert cache.n_bytes == cache.budget.limit
    assert not cache.n_refused
    other = np.zeros(500, np.uint8)
    assert not put(cache, windowed(prompt(2), 100, (other,)))
    check_invariants(cache)


def test_the_budget_holds_where_windows_are_shared() -> None:
    tokens = prompt(1)
    budget = 400 * (ROW + 4) + 6 * STATE
    cache = RamCache(16, budget)
    blocks = [np.zeros(500, np.uint8) for _ in range(9)]
    parent = None
    for i in range(8):
        snapshot = windowed(tokens, 50 * (i + 1), (blocks[i], blocks[i + 1]), parent)
        if put(cache, snapshot):
            parent = snapshot.segment
        check_invariants(cache)
        assert cache.n_bytes <= budget
    assert cache.evictor.n_evicted
    assert len(cache.snapshots()) > 1


def test_the_budget_holds_after_every_confirm() -> None:
    budget = 3 * (100 * (ROW + 4) + STATE)
    cache = RamCache(16, budget)
    for seed in range(10):
        assert put(cache, make(prompt(seed), 100))
        check_invariants(cache)
    assert len(cache.snapshots()) == 3
    assert not cache.may_add(PromptMatch(prompt(99)).prefix(100), budget + 1)
    protected = cache.snapshots()
    assert not put(cache, make(prompt(50), 100), *protected), "no room without the locked ones"
    assert cache.snapshots() == protected
    check_invariants(cache)


@pytest.mark.parametrize(("n_slots", "budget"), [(0, 0), (4, 0)])
def test_a_cache_that_is_off_takes_nothing(n_slots: int, budget: int) -> None:
    cache = RamCache(n_slots, budget)
    assert not cache.enabled
    assert not put(cache, make(prompt(1), 100))
    assert found(cache, prompt(1)) == []


def test_a_snapshot_on_rows_that_were_given_up_is_refused() -> None:
    cache = RamCache(2, None)
    tokens = prompt(1)
    stem = make(tokens, 100)
    put(cache, stem)
    cache.drop(stem)
    with pytest.raises(ValueError, match="dropped"):
        put(cache, make(tokens, 200, stem.segment))
    check_invariants(cache)
