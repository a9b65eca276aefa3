"""The RAM cache under random histories: nothing that has to stay leaves, and the budget holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import NOTHING, PromptMatch, Segment, Snapshot, State
from pyctl.prompt import as_tokens
from tests.unit.cache.checks import check_invariants
from tests.unit.cache.fake_rows import FakeHeldRows
from tests.unit.cache.grown import STEP


@dataclass(eq=False)
class OnDevice(FakeHeldRows):
    """Rows that can be released once."""

    is_held: bool = True


def on_device_rows(n: int) -> OnDevice:
    """Return ``n`` rows of three bytes that the device holds."""
    return OnDevice(n, 3 * n)


class RamHistories(RuleBasedStateMachine):
    """A state machine of the RAM cache: a locked, pinned or retained snapshot never leaves, the
    budget holds, rows are always somewhere, and the books agree with the contents.
    """

    @initialize(n_slots=st.integers(0, 8), budget=st.sampled_from([None, 700, 2000]))
    def start(self, n_slots: int, budget: int | None) -> None:
        self.cache = RamCache(n_slots, budget)
        self.cache.index.pool.on_drop = self.dropped
        self.cache.evictor.on_evict = self.evicted
        self.seed = self.n_evicted = 0

    def dropped(self, segment: Segment) -> None:
        assert not segment.dropped
        if segment.held is not None:
            self.release(segment)

    def evicted(self, snapshot: Snapshot, worth: float) -> None:
        assert self.cache.get(snapshot.prefix) is snapshot
        assert worth > 0
        for segment in snapshot.chain:
            assert segment.rows.size or (segment.held is not None and segment.held.is_held), (
                "its rows are all there"
            )
        self.n_evicted += 1

    def release(self, segment: Segment) -> None:
        assert segment.held.is_held, "released once"
        segment.held.is_held = False

    def held(self) -> list[Snapshot]:
        return self.cache.snapshots()

    def made(self, stem: Snapshot | None, size: int, middle: bool, on_device: bool) -> Snapshot:
        self.seed += 1
        before = as_tokens([]) if stem is None else stem.last_tokens(stem.n)
        start = 0 if stem is None else max(stem.n - size, 0) if middle else stem.n
        fresh = np.random.default_rng(self.seed).integers(0, 1000, size + STEP)
        tokens = as_tokens(np.concatenate([before[:start], fresh]))
        parent = stem.segment_at(start) if stem is not None and start else None
        rows = NOTHING if on_device else np.zeros(3 * (size + STEP), np.uint8)
        segment = Segment(start, as_tokens(tokens[start:]), rows, parent)
        segment.held = on_device_rows(size + STEP) if on_device else None
        return Snapshot(
            PromptMatch(tokens).prefix(int(tokens.size)),
            segment,
            State.from_parts(np.zeros(100, np.uint8)),
        )

    @rule(data=st.data(), size=st.integers(0, 30), middle=st.booleans(), on_device=st.booleans())
    def save(self, data: st.DataObject, size: int, middle: bool, on_device: bool) -> None:
        before = self.held()
        self.cache.next_turn()
        stem = data.draw(st.sampled_from([None, *before]))
        protected = data.draw(st.sets(st.sampled_from(before))) if before else set()
        protected |= {stem} if stem is not None else set()
        snapshot = self.made(stem, size, middle, on_device)
        with self.cache.locked(*protected):
            may_add = self.cache.may_add(snapshot.prefix, snapshot.state.n_bytes, snapshot.segment)
            assert self.held() == before, "nothing leaves before it is added"
            assert self.cache.add(snapshot) == may_add == (snapshot in self.held())
        assert protected | self.cache.index.pinned <= set(self.held())
        assert may_add or self.held() == before, "nothing leaves for what is refused"

    @rule(data=st.data())
    @precondition(lambda self: self.held())
    def touch(self, data: st.DataObject) -> None:
        self.cache.touch(data.draw(st.sampled_from(self.held())))

    @rule(data=st.data(), pinned=st.booleans())
    @precondition(lambda self: self.held())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        snapshot = data.draw(st.sampled_from(self.held()))
        done = self.cache.pin(snapshot.prefix.name, pinned)
        assert done or (pinned and self.cache.budget.limit is not None)

    @rule(data=st.data())
    @precondition(lambda self: self.held())
    def drop(self, data: st.DataObject) -> None:
        snapshot = data.draw(st.sampled_from(self.held()))
        n_evicted = self.n_evicted
        self.cache.drop(snapshot)
        assert snapshot not in self.held()
        assert self.n_evicted == n_evicted, "a dropped snapshot is not spilled"

    @rule(data=st.data(), on_device=st.booleans())
    def retain(self, data: st.DataObject, on_device: bool) -> None:
        stem = data.draw(st.sampled_from([None, *self.held()]))
        before = set(self.cache.index.pinned)
        self.cache.protect(self.made(stem, 10, False, on_device))
        assert before <= set(self.held())

    @rule(data=st.data())
    @precondition(lambda self: self.cache.index.retained)
    def release_one(self, data: st.DataObject) -> None:
        self.cache.release(data.draw(st.sampled_from(self.cache.index.retained)))

    @rule(data=st.data())
    def copy_to_ram(self, data: st.DataObject) -> None:
        """Do the work of an idle moment."""
        only = self.cache.held.only_held()
        assert set(only) == {
            each for each in self.cache.segments() if each.held and not each.rows.size
        }
        if only:
            segment = data.draw(st.sampled_from(only))
            before = self.held()
            if self.cache.held.make_room(segment, segment.held.n_bytes, only_if_free=True):
                self.cache.index.pool.add_rows(segment, np.zeros(segment.held.n_bytes, np.uint8))
            assert self.held() == before

    @rule(data=st.data())
    def drop_ram_copy(self, data: st.DataObject) -> None:
        both = self.cache.index.pool.copies()
        if both:
            segment = data.draw(st.sampled_from(both))
            before = self.cache.n_bytes
            self.cache.index.pool.drop_ram_copy(segment)
            assert self.cache.n_bytes == before - 3 * segment.held.n_cells

    @rule(data=st.data())
    def leave_device(self, data: st.DataObject) -> None:
        """Release rows on the device, as the engine does when cells run short."""
        held = self.held()
        protected = data.draw(st.sets(st.sampled_from(held))) if held else set()
        blocked = {
            link
            for each in self.cache.segments()
            if each.held and data.draw(st.booleans())
            for link in [each]
        }
        with self.cache.locked(*protected):
            self.leave_one(blocked, protected)

    def leave_one(self, blocked: set[Segment], protected: set[Snapshot]) -> None:
        """Move the segment that the eviction order chooses from the device to RAM, or evict the
        snapshots that need it where RAM has no room. No blocked, pinned or protected snapshot may
        be lost.
        """
        held = self.held()
        fixed = set(self.cache.index.pinned)
        segment = next(
            self.cache.held.eviction_order(
                lambda each: 0 if each in blocked else each.held.n_cells
            ),
            None,
        )
        if segment is None:
            needed = {link for each in protected for link in each.chain}
            may = [each for each in self.cache.segments() if each.held and each not in blocked]
            assert all(each in needed and not each.rows.size for each in may)
            return
        assert segment not in blocked
        if not segment.rows.size:
            n_bytes = segment.held.n_bytes
            if not self.cache.held.make_room(segment, n_bytes):
                assert self.held() == held, "nothing left for what found no room"
                self.cache.held.evict_dependents(segment)
                assert segment.dropped
                assert fixed | protected <= set(self.held())
                return
            assert not segment.dropped
            self.cache.index.pool.add_rows(segment, np.zeros(n_bytes, np.uint8))
        self.release(segment)
        segment.held = None
        assert fixed | protected <= set(self.held())

    @rule(data=st.data())
    @precondition(lambda self: self.cache.index.pinned or self.cache.index.retained)
    def what_has_to_stay_is_not_lost(self, data: st.DataObject) -> None:
        pinned = self.cache.index.pinned | set(self.cache.index.retained)
        if pinned:
            before = self.held()
            with pytest.raises(ValueError, match="has to stay"):
                self.cache.held.evict_dependents(
                    data.draw(st.sampled_from([link for one in pinned for link in one.chain]))
                )
            assert self.held() == before

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "cache"):
            check_invariants(self.cache)
            for segment in self.cache.segments():
                assert segment.rows.size or (segment.held is not None and segment.held.is_held)
            assert self.cache.evictor.n_evicted == self.n_evicted
            ends = {snapshot.prefix for snapshot in self.cache.conversation_ends()}
            for one in self.held():
                goes_on = any(
                    other.n > one.n and other.chain.get(one.segment, 0) >= one.n
                    for other in self.held()
                )
                assert (one.prefix in ends) != goes_on


TestRamHistories = RamHistories.TestCase
TestRamHistories.settings = settings(stateful_step_count=40)


@pytest.mark.parametrize(("budget", "fits"), [(4200, True), (4100, False)])
def test_a_copy_that_is_shed_makes_room_once(budget: int, fits: bool) -> None:
    """A copy that is shed makes room once, and not once more with the snapshot that has it."""
    cache = RamCache(0, budget)
    for seed, n, rows in ((1, 20, np.zeros(2000, np.uint8)), (2, 40, NOTHING)):
        tokens = as_tokens(np.random.default_rng(seed).integers(0, 1000, n))
        segment = Segment(0, tokens, rows, None)
        segment.held = on_device_rows(n)
        assert cache.add(Snapshot(PromptMatch(tokens).prefix(n), segment, State()))
    before = cache.snapshots()
    assert cache.n_bytes == 2000 + 4 * (20 + 40)
    assert cache.held.make_room(segment, 4000) == fits
    if not fits:
        assert cache.snapshots() == before
        assert cache.n_bytes == 2000 + 4 * (20 + 40)
        return
    cache.index.pool.add_rows(segment, np.zeros(4000, np.uint8))
    assert cache.snapshots() == before[1:]
    check_invariants(cache)
