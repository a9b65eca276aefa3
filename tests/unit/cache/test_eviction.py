"""Eviction: the prefix tree and the policies against a plain search, and invariants of both caches
under random histories.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyctl.cache.eviction import CostAwareEviction, Likelihoods
from pyctl.cache.prefix_tree import PrefixTree
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import NOTHING, PromptMatch, Segment, Snapshot, State
from pyctl.disk.file_format import SegmentName, StateName
from pyctl.disk.graph import FileGraph
from pyctl.disk.index import Key, Record
from pyctl.prompt import as_tokens
from tests.effort import examples
from tests.unit.cache.checks import check_invariants

STEP = 10

SHAPES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 3), st.booleans()), min_size=1, max_size=40
)
"""For each snapshot: which earlier one it continues (0 for none), by how many steps, and whether
from its middle.
"""


@dataclass
class Held:
    """A snapshot of a plain search: its segments with the positions up to which they count, the
    deepest first.
    """

    n: int
    chain: dict[int, int]
    used: float = 0.0
    is_turn: bool = False
    seen: float = -1.0
    reach: int = 0
    opening: int = 0

    def stems_from(self, other: Held) -> bool:
        return other.n < self.n and self.chain.get(next(iter(other.chain)), 0) >= other.n

    def below(self, held: dict[int, Held]) -> int:
        return max((other.n for other in held.values() if self.stems_from(other)), default=0)


def grown(shapes: list[tuple[int, int, bool]]) -> list[Held]:
    found: list[Held] = []
    for segment, (stem, steps, middle) in enumerate(shapes):
        chain: dict[int, int] = {}
        start = 0
        if found and stem:
            parent = found[stem % len(found)]
            start = parent.n - STEP // 2 if middle else parent.n
            chain = {other: min(last, start) for other, last in parent.chain.items()}
        n = start + steps * STEP
        used = float(segment)
        found.append(Held(n, {segment: n, **chain}, used, False, used, n))
    return found


@given(SHAPES, st.lists(st.integers(0, 39)))
def test_the_tree_knows_what_a_plain_search_finds(
    shapes: list[tuple[int, int, bool]], gone: list[int]
) -> None:
    tree: PrefixTree[int] = PrefixTree()
    held: dict[int, Held] = {}
    steps: list[tuple[str, int]] = [("add", key) for key in range(len(shapes))]
    for at, key in enumerate(gone):
        steps.insert(min(len(steps), 2 * at + 1), ("remove", key))
    everything = grown(shapes)
    for verb, key in steps:
        if verb == "remove" and key in held:
            tree.remove(key)
            del held[key]
        elif verb == "add":
            tree.add(key, everything[key].n, everything[key].chain.items(), 0.0)
            held[key] = everything[key]
        assert {node.key for node in tree} == held.keys()
        for node in tree:
            one = held[node.key]
            assert (node.parent.n if node.parent is not None else 0) == one.below(held)
            deeper = any(other.stems_from(one) for other in held.values())
            assert bool(node.children) == deeper
        for node in tree:
            node.expected_resumes = 1.0
        weights = tree.expected_resumes()
        for segment in {segment for one in held.values() for segment in one.chain}:
            needing = {key for key, one in held.items() if segment in one.chain}
            assert {node.key for node in tree.through(segment)} == needing
            assert weights[segment] == len(needing)


def children_of(one: Held, held: dict[int, Held]) -> list[Held]:
    below = [other for other in held.values() if other.stems_from(one)]
    return [other for other in below if not any(other.stems_from(middle) for middle in below)]


def plain_worth(
    one: Held,
    held: dict[int, Held],
    now: float,
    half: float,
    odds: Likelihoods,
    hits: int,
    above: list[Held],
) -> float:
    """Return the worth by the rule of `CostAwareEviction`, as it would be written without an
    index.
    """

    def age(used: float) -> float:
        return half / (max(now - used, 0.0) + half)

    def newest(of: Held) -> Held:
        deeper = [other for other in held.values() if other.stems_from(of)]
        return max([of, *deeper], key=lambda other: (other.seen, other.n))

    def cut_back(end: int, first: int, last: int) -> float:
        share = math.log((end - first + odds.near) / (end - last + odds.near)) / math.log(
            1 + end / odds.near
        )
        return (1 - odds.end) * share

    def anew(opening: int, first: int, last: int) -> float:
        if first >= (last := min(last, opening)):
            return 0.0
        return (
            odds.head
            * math.log((opening - first + odds.near) / (opening - last + odds.near))
            / math.log(1 + opening / odds.near)
        )

    children = children_of(one, held)
    total = 0.0
    if not any(newest(child).seen >= one.seen for child in children):
        total += age(one.seen) * (odds.end + cut_back(one.reach, one.n, one.reach))
        total += age(one.seen) * anew(one.opening, one.n, one.reach)
    for child in children:
        total += age(newest(child).seen) * cut_back(newest(child).reach, one.n, child.n)
        total += age(newest(child).seen) * anew(newest(child).opening, one.n, child.n)
    if not above and not newest(one).opening:
        total += odds.head * age(newest(one).seen)
    # Those below it along the newest branch, as deep as that goes.
    last = one
    line = []
    while below := [each for each in children_of(last, held) if newest(each).seen >= last.seen]:
        last = max(below, key=lambda each: (newest(each).seen, newest(each).n))
        line.append(last)
    if one.is_turn and not any(each.is_turn for each in line):
        total += odds.turn * age(newest(one).seen)
    total += odds.again * min(max(len(children), hits, 1) - 1, odds.max_again) * age(one.used)
    return total * (one.n - max((other.n for other in above), default=0))


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 3), st.booleans()), min_size=1, max_size=10
    ),
    st.data(),
)
@settings(max_examples=examples(80))
def test_the_policy_chooses_what_the_plain_rule_chooses(
    shapes: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    tree: PrefixTree[int] = PrefixTree()
    held = dict(enumerate(grown(shapes)))
    hits = {key: data.draw(st.integers(0, 3)) for key in held}
    for key, one in held.items():
        one.is_turn = data.draw(st.booleans())
        one.opening = data.draw(st.integers(0, 60))
        node = tree.add(key, one.n, one.chain.items(), one.used, hits[key])
        node.is_turn = one.is_turn
        node.own.n_opening = one.opening
    freed = {key: data.draw(st.integers(0, 1000)) for key in held}
    now = 100.0
    policy = CostAwareEviction(tree, freed.__getitem__, lambda: now)
    while held:
        now += 1
        evictable = {key for key in held if data.draw(st.booleans())}
        value = {}
        for key, one in held.items():
            above = [other for other in held.values() if one.stems_from(other)]
            worth = plain_worth(one, held, now, 60.0, Likelihoods(), hits[key], above) * 1e-3
            assert policy.value(key) == pytest.approx(worth)
            value[key] = worth / max(freed[key], 1)
        key = policy.choose_victim(evictable.__contains__)
        assert (key is None) == (not evictable)
        if key is None:
            break
        assert value[key] == pytest.approx(min(value[each] for each in evictable))
        tree.remove(key)
        gone = held.pop(key)
        above = [other for other in held.values() if gone.stems_from(other)]
        if above and gone.seen >= max(above, key=lambda other: other.n).seen:
            heir = max(above, key=lambda other: other.n)
            heir.seen = gone.seen
            heir.reach = gone.reach
            heir.opening = gone.opening


@pytest.mark.parametrize(("opening", "ranked"), [(0, [20, 30, 40, 10]), (5000, [10, 20, 30, 40])])
def test_late_in_an_opening_others_are_expected_to_leave_it(
    opening: int, ranked: list[int]
) -> None:
    """The last of snapshots at even distances in an opening is worth most; without an opening, the
    first of all.
    """
    tree: PrefixTree[int] = PrefixTree()
    policy = CostAwareEviction(tree, lambda key: 1, lambda: 1.0)
    segments: list[tuple[int, int]] = []
    for key in (10, 20, 30, 40, 50, 300):
        segments.insert(0, (key, 100 * key))
        tree.add(key, 100 * key, segments, 1.0).own.n_opening = opening
    assert [key for key in policy.rank() if key <= 40] == ranked


@dataclass(eq=False)
class OnDevice:
    """Rows that a device without any cells pretends to hold."""

    n_cells: int
    is_held: bool = True

    @property
    def n_bytes(self) -> int:
        return 3 * self.n_cells


class RamHistories(RuleBasedStateMachine):
    """A state machine of the RAM cache: a locked, pinned or retained snapshot never leaves, the
    budget holds, rows are always somewhere, and the books agree with the contents.
    """

    @initialize(n_slots=st.integers(0, 8), budget=st.sampled_from([None, 700, 2000]))
    def start(self, n_slots: int, budget: int | None) -> None:
        self.cache = RamCache(n_slots, budget)
        self.cache.pool.on_drop = self.dropped
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
        segment.held = OnDevice(size + STEP) if on_device else None
        return Snapshot(
            PromptMatch(tokens).prefix(int(tokens.size)), segment, State.of(np.zeros(100, np.uint8))
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
        assert protected | self.cache.pinned <= set(self.held())
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
        before = set(self.cache.pinned)
        self.cache.retain(self.made(stem, 10, False, on_device))
        assert before <= set(self.held())

    @rule(data=st.data())
    @precondition(lambda self: self.cache.retained)
    def release_one(self, data: st.DataObject) -> None:
        self.cache.release(data.draw(st.sampled_from(self.cache.retained)))

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
                self.cache.pool.add_rows(segment, np.zeros(segment.held.n_bytes, np.uint8))
            assert self.held() == before

    @rule(data=st.data())
    def drop_ram_copy(self, data: st.DataObject) -> None:
        both = self.cache.pool.copies()
        if both:
            segment = data.draw(st.sampled_from(both))
            before = self.cache.n_bytes
            self.cache.pool.drop_ram_copy(segment)
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
        held = self.held()
        fixed = set(self.cache.pinned)
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
            self.cache.pool.add_rows(segment, np.zeros(n_bytes, np.uint8))
        self.release(segment)
        segment.held = None
        assert fixed | protected <= set(self.held())

    @rule(data=st.data())
    @precondition(lambda self: self.cache.pinned or self.cache.retained)
    def what_has_to_stay_is_not_lost(self, data: st.DataObject) -> None:
        pinned = self.cache.pinned | set(self.cache.retained)
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
        segment.held = OnDevice(n)
        assert cache.add(Snapshot(PromptMatch(tokens).prefix(n), segment, State()))
    before = cache.snapshots()
    assert cache.n_bytes == 2000 + 4 * (20 + 40)
    assert cache.held.make_room(segment, 4000) == fits
    if not fits:
        assert (cache.snapshots(), cache.n_bytes) == (before, 2000 + 4 * (20 + 40))
        return
    cache.pool.add_rows(segment, np.zeros(4000, np.uint8))
    assert cache.snapshots() == before[1:]
    check_invariants(cache)


def records_of(held: list[Held], data: st.DataObject) -> list[Record]:
    """Return a record of each segment's file and of each state's."""
    found = []
    rows: dict[int, SegmentName] = {}
    for key, one in enumerate(held):
        parent = next((at for at in one.chain if at != key), None)
        start = one.chain[parent] if parent is not None else 0
        rows[key] = SegmentName(start, one.n, key.to_bytes(16, "big"), bytes(8))
        above = rows[parent] if parent is not None else None
        found.append(Record("f", rows[key], (one.n - start) * 4, above, True, 0.0, one.used))
        name = StateName(one.n, key.to_bytes(16, "big"))
        size = data.draw(st.integers(1, 100))
        pinned = st.booleans()
        found.append(Record("f", name, size, rows[key], True, 0.0, one.used, 0, data.draw(pinned)))
    return found


@given(SHAPES, st.data())
def test_disk_keeps_pinned_and_protected_within_its_budget(
    shapes: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    graph = FileGraph(records_of(grown(shapes), data))
    states = [record for record in graph.records.values() if record.is_state]
    pinned: set[Key] = {record.key for record in states if record.pinned}
    protected = {record.key for record in states if data.draw(st.booleans())}
    budgets = sorted(
        data.draw(st.lists(st.integers(0, graph.n_bytes), min_size=1, max_size=4)), reverse=True
    )
    for budget in budgets:
        before = graph.n_bytes
        files = set(graph.records)
        going = graph.shrink(budget, protected)
        assert graph.n_bytes == sum(record.n_bytes for record in graph.records.values())
        assert graph.n_bytes == before - sum(record.n_bytes for record in going)
        assert {record.key for record in going} == files - graph.records.keys()
        assert pinned | protected <= graph.records.keys()
        assert not graph.invalid_keys()
        left = [record.key for record in graph.records.values() if record.is_state]
        assert graph.n_bytes <= budget or all(key in pinned | protected for key in left)
        assert graph.shrink(budget, protected) == [], "no more than it had to"
        assert sum(graph.added().values()) == graph.n_bytes
        gone = {record.key: record for record in going}
        for at in (record for record in going if record.is_state and graph.n_bytes <= budget):
            n_bytes = graph.n_bytes
            while at is not None:
                n_bytes = n_bytes + at.n_bytes
                at = gone.get(at.parent_key)
            assert n_bytes > budget, "what would fit after all stays"
