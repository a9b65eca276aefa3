"""The positions at which a prompt can resume, their order, and the cost of the search."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.candidates import Candidate, ResumeCandidates
from pyctl.cache.held_segments import HeldSegments
from pyctl.cache.positions import last_common_end
from pyctl.cache.ram import RamCache
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import NOTHING, Prefix, PromptMatch, Segment, Snapshot, State
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.prompt import Tokens, as_tokens
from tests.fake import FakeBackend
from tests.unit.cache.fake_rows import FakeHeldRows
from tests.unit.cache.steps import Steps, ends_of, longer, prompt_of
from tests.unit.engine.drive import ask, chat

N = 300


@given(data=st.data())
def test_batches_are_compared_as_lists_of_their_ends_are(data: st.DataObject) -> None:
    """Batches are compared alike on a tree of segments whose ends are mostly, but not always, those
    of the prompt.
    """
    places = st.sets(st.integers(1, 60), max_size=8)
    ends = sorted(data.draw(places) | {60})
    finder = ResumeCandidates(
        PromptMatch(as_tokens(range(60))),
        ends,
        LiveSequence(0, 60),
        FakeBackend("hybrid").shape,
        exact=True,
    )
    segments = [Segment(0, as_tokens(range(20)), NOTHING, None, (5, 20))]
    for _ in range(data.draw(st.integers(1, 8))):
        parent = data.draw(st.sampled_from([each for each in segments if each.start < 59]))
        start = data.draw(st.integers(parent.start + 1, min(parent.end, 59)))
        stop = data.draw(st.integers(start + 1, 60))
        known = ends if data.draw(st.booleans()) else sorted(data.draw(places))
        own = tuple(end for end in known if start < end <= stop)
        segments.append(Segment(start, as_tokens(range(start, stop)), NOTHING, parent, own))
        segment = data.draw(st.sampled_from(segments))
        n = data.draw(st.integers(segment.start + 1, segment.end))
        snapshot = Snapshot(Prefix(b"", n), segment, State())
        assert finder.has_same_batches(snapshot) == (
            last_common_end(ends, snapshot.batch_ends, n) == n
        )


def filled(tokens: Tokens, cache: RamCache | None = None) -> tuple[RamCache, list[int]]:
    """Return a cache with a conversation and a snapshot every ten tokens, and their positions."""
    cache = cache or RamCache(0, None)
    match = PromptMatch(tokens)
    segment = None
    ends = list(range(10, N + 1, 10))
    for end in ends:
        segment = Segment(
            end - 10, as_tokens(tokens[end - 10 : end]), np.zeros(10, np.uint8), segment, (end,)
        )
        assert cache.add(
            Snapshot(match.prefix(end), segment, State.from_parts(np.zeros(8, np.uint8)))
        )
    return cache, ends


@pytest.mark.parametrize("exact", [False, True])
def test_many_snapshots_of_one_conversation_cost_no_chain_each(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for candidates and for the next segment to evict walks each link a few times at
    most, however many snapshots share it. One walk per snapshot would be quadratic in a long
    conversation.
    """
    tokens = as_tokens(np.random.default_rng(1).integers(0, 250, N + 5))
    cache, ends = filled(tokens)
    links = [0]
    match = PromptMatch(tokens)
    real = Snapshot.iter_chain

    def counted(snapshot: Snapshot):  # type: ignore[no-untyped-def]
        for link in real(snapshot):
            links[0] += 1
            yield link

    monkeypatch.setattr(Snapshot, "iter_chain", counted)
    candidates = ResumeCandidates(
        match, [*ends, N + 5], LiveSequence(0, N + 5), FakeBackend("hybrid").shape, exact=exact
    ).find(cache)
    assert [each.n for each in candidates] == ends[::-1]
    found = [each.snapshot for each in candidates if each.snapshot is not None]
    assert len(match.hashed) == 1, "what is compared need not be hashed"
    for snapshot in found:
        snapshot.segment.held = FakeHeldRows(10, 10)
    with cache.locked(*found):
        leaving = next(cache.held.eviction_order(lambda segment: 1), None)
    assert leaving is not None, "RAM has it, too"
    assert all("chain" not in vars(snapshot) for snapshot in found)
    assert links[0] <= 4 * len(ends)


def test_restore_evicts_device_rows_with_ram_copies_first() -> None:
    older, newer = (as_tokens(np.random.default_rng(seed).integers(0, 250, N)) for seed in (1, 2))
    cache, _ = filled(older)
    wanted = cache.snapshots()
    cache.index.turn += 10
    filled(newer, cache)
    for segment in cache.segments():
        segment.held = FakeHeldRows(10, 10)
    left = []
    with cache.locked(*wanted):
        while (segment := next(cache.held.eviction_order(lambda segment: 1), None)) is not None:
            segment.held = None
            left.append(segment in {link for snapshot in wanted for link in snapshot.chain})
    assert left == sorted(left)
    assert len(left) == 2 * N // 10


def test_of_many_conversations_only_those_that_begin_alike_are_compared() -> None:
    cache = RamCache(0, None)
    for seed in range(30):
        tokens = as_tokens(np.random.default_rng(seed).integers(0, 250, N + 5))
        _, ends = filled(tokens, cache)
    assert len(cache.snapshots()) == 900
    with patch.object(
        PromptMatch, "shared", autospec=True, side_effect=PromptMatch.shared
    ) as compared:
        assert [each.n for each in cache.lookup(PromptMatch(tokens), N)] == ends[::-1]
    assert 0 < compared.call_count < 30 + len(ends)


def test_many_rows_that_leave_the_device_are_ranked_once() -> None:
    engine = Engine(FakeBackend(n_ctx=4096), RamCache(0, None), EngineSettings())
    ask(engine, chat(*((seed, 100) for seed in range(30))), 1)
    ask(engine, chat((99, 40)), 1)
    n_segments = sum(each.held is not None for each in engine.prefix_cache.cache.segments())
    assert n_segments >= 8
    order = HeldSegments.eviction_order
    with patch.object(HeldSegments, "eviction_order", autospec=True, side_effect=order) as ranked:
        assert engine.prefix_cache.device.shrink(0)
    assert engine.prefix_cache.device.counts.to_ram > 2500
    assert ranked.call_count == 1


def position_of(candidate: Candidate) -> tuple[int, int, str, bool]:
    return candidate.n, candidate.n_kept, candidate.source, candidate.has_state


def test_of_equal_positions_live_rows_come_first_and_then_a_state() -> None:
    """The end of the live sequence is also in RAM: continuing it copies nothing."""
    steps = Steps("hybrid")
    prompt = prompt_of(1)
    steps.serve(prompt)
    steps.cache.saver.save(steps.seq, steps.plan_of(prompt), RequestStats(0))
    positions = [position_of(each) for each in steps.lookup(longer(prompt, 2)).candidates]
    assert positions[:2] == [(400, 400, "live", False), (400, 400, "live", True)]
    assert [n for n, *_ in positions] == sorted((n for n, *_ in positions), reverse=True)


def test_a_candidate_loses_its_live_rows_when_the_sequence_does() -> None:
    live = LiveSequence(0, 100)
    live.append(as_tokens(range(50)), exact=True)
    segment = Segment(0, as_tokens(range(50)), NOTHING, None)
    snapshot = Snapshot(Prefix(b"", 50), segment, State())
    candidates = [Candidate("live", 50, 50), Candidate("ram", 50, 40, snapshot)]
    assert [each.recheck(live) for each in candidates] == candidates
    live.truncate(0)
    assert [each.recheck(live) for each in candidates] == [None, Candidate("ram", 50, 0, snapshot)]
    segment.drop()
    assert candidates[1].recheck(live) is None


@pytest.mark.parametrize(
    ("in_blocks", "exact", "expected"),
    [(False, False, 340), (True, False, 300), (False, True, 300)],
)
def test_a_reply_is_cut_within_unless_that_tells_others_or_differs(
    in_blocks: bool, exact: bool, expected: int
) -> None:
    """A prompt leaves a live reply after 40 of its tokens; rows are all that the model needs."""
    steps = Steps("attention")
    prompt = prompt_of(1, 300)
    steps.serve(prompt)
    steps.generate(prompt_of(2, 100).tokens)
    tokens = np.concatenate((steps.seq.tokens[:340], prompt_of(3, 100).tokens))
    found = ResumeCandidates(
        PromptMatch(as_tokens(tokens)),
        [*ends_of(prompt), 440],
        steps.seq,
        steps.memory.shape,
        exact=exact,
        in_blocks=in_blocks,
    ).find(RamCache(0, None))
    assert [each.n for each in found] == [expected]


@pytest.mark.parametrize("may_end", [True, False])
def test_the_whole_prompt_is_a_candidate_if_its_output_is_cached(may_end: bool) -> None:
    steps = Steps("hybrid")
    prompt = prompt_of(1)
    stats = steps.serve(prompt)
    lookup = steps.lookup(prompt)
    steps.cache.saver.save_end(steps.seq, lookup, stats, steps.memory.output, n_alike=1)
    assert len(steps.ram.prompt_ends) == 1
    steps.cache.forget(steps.seq)
    finder = ResumeCandidates(
        PromptMatch(prompt.tokens), ends_of(prompt), steps.seq, steps.memory.shape, exact=True
    )
    found = finder.find(steps.ram, may_end=may_end)
    assert (found[0].n == len(prompt)) == may_end
