"""The steps of a request: what a lookup notes, what is parked, what a plan holds, their times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.prefix_cache import PrefixCache
from pyctl.prompt import Prompt
from tests.unit.cache.checks import check_invariants
from tests.unit.cache.fake_disk import FakeDisk
from tests.unit.cache.steps import Asked, Steps, TickingStats, ends_of, longer, prompt_of


@pytest.mark.parametrize(
    ("fields", "n_recent", "n_turns"),
    [
        ({}, 1, 1),
        ({"cache_prompt": False}, 0, 0),
        ({"after": Asked(prompt_of(1)), "background": True}, 0, 0),
    ],
)
def test_every_way_out_of_a_lookup_is_timed(
    fields: dict[str, Any], n_recent: int, n_turns: int
) -> None:
    """Only prompts of clients that allow the cache are recent, and turns of its clock."""
    steps = Steps()
    stats = TickingStats(0)
    lookup = steps.lookup(prompt_of(1), stats, **fields)
    assert stats.lookup_ms == 1000
    assert (lookup.recent is not None) == bool(n_recent)
    assert len(steps.cache.recent) == n_recent
    assert steps.ram.turn == n_turns


def test_restores_and_what_they_park_are_one_time() -> None:
    """Parking takes three seconds of the clock, one of them for the save within it."""
    steps = Steps()
    steps.serve(prompt_of(1))
    lookup = steps.lookup(prompt_of(2))
    stats = TickingStats(0)
    steps.cache.park_previous(steps.seq, lookup, stats)
    assert stats.restore_ms == 3000
    assert stats.save_ms == 1000
    steps.restore(lookup, stats)
    assert stats.restore_ms == 4000


def test_a_block_that_raises_is_timed() -> None:
    stats = TickingStats(0)
    with pytest.raises(KeyError), stats.timed("restore_ms"):
        raise KeyError
    assert stats.restore_ms == 1000


@pytest.mark.parametrize(
    ("follows", "background", "parks"),
    [(False, False, True), (True, False, False), (True, True, True)],
)
def test_a_conversation_is_parked_unless_the_prompt_continues_it(
    follows: bool, background: bool, parks: bool
) -> None:
    """A background request also has saved what it would only overwrite if it is interrupted."""
    steps = Steps()
    steps.serve(prompt_of(1))
    steps.generate(prompt_of(3, 100).tokens)
    tokens = np.concatenate((steps.seq.tokens, prompt_of(4, 50).tokens))
    prompt = Prompt.from_ids(tokens, [100, 250, 400]) if follows else prompt_of(2)
    lookup = steps.lookup(prompt, background=background)
    before = len(steps.ram.snapshots())
    steps.cache.park_previous(steps.seq, lookup, RequestStats(len(prompt)))
    assert len(steps.ram.snapshots()) - before == parks
    assert steps.seq.facts is lookup.facts


def test_a_short_end_is_not_worth_a_snapshot() -> None:
    steps = Steps()
    prompt = prompt_of(1)
    steps.serve(prompt)
    steps.cache.saver.save(steps.seq, steps.plan_of(prompt), RequestStats(400))
    steps.generate(prompt_of(3, 63).tokens)
    before = steps.ram.snapshots()
    steps.cache.park(steps.seq)
    assert steps.ram.snapshots() == before
    assert steps.seq.n == 0


def test_a_plan_has_snapshots_where_the_prompt_leaves_the_nearest_one() -> None:
    """The branch point is unknown until a second prompt comes; its rows may be in RAM already."""
    steps = Steps()
    steps.serve(prompt_of(1, 900, [100, 300, 500, 700]))
    edited = prompt_of(1, 900, [100, 300, 500, 700]).tokens.copy()
    edited[550:] = prompt_of(2, 350).tokens
    prompt = Prompt.from_ids(edited, [100, 300, 500, 700])
    stats = RequestStats(900)
    lookup = steps.lookup(prompt, stats)
    steps.cache.park_previous(steps.seq, lookup, stats)
    restored = steps.restore(lookup, stats)
    plan = steps.cache.plan(lookup, restored, steps.seq, stats)
    branch = max(end for end in lookup.batch_ends if end <= 550)
    assert stats.n_cached < branch
    assert branch in plan.cuts
    assert steps.seq.n_overlap == 550
    assert stats.miss is not None
    assert stats.miss.position == 550
    assert stats.miss.nearest == stats.n_cached


@pytest.mark.parametrize(
    ("exact", "may_read_prompts", "branches"),
    [(False, True, True), (True, True, False), (False, False, False)],
)
def test_raw_text_may_have_a_snapshot_within_a_batch(
    exact: bool, may_read_prompts: bool, branches: bool
) -> None:
    steps = Steps(exact=exact)
    steps.serve(prompt_of(1, 900, ()))
    edited = prompt_of(1, 900, ()).tokens.copy()
    edited[555:] = prompt_of(2, 345).tokens
    stats = RequestStats(900)
    lookup = steps.lookup(Prompt.from_ids(edited), stats, may_read_prompts=may_read_prompts)
    steps.cache.park_previous(steps.seq, lookup, stats)
    restored = steps.restore(lookup, stats)
    plan = steps.cache.plan(lookup, restored, steps.seq, stats, may_branch=True)
    assert (555 in plan.cuts) == branches


def test_the_end_of_the_program_writes_conversations_the_last_however_short() -> None:
    disk = FakeDisk()
    steps = Steps(disk=disk)
    for seed in (1, 2):
        steps.serve(prompt_of(seed))
        steps.cache.park(steps.seq)
    assert steps.cache.close()
    ends = steps.ram.conversation_ends()
    assert disk.written == [(ends[1], False), (ends[0], True)]


def test_a_request_without_the_cache_leaves_nothing() -> None:
    steps = Steps()
    steps.serve(prompt_of(1), cache_prompt=False)
    steps.cache.park(steps.seq)
    lookup = steps.lookup(prompt_of(1), cache_prompt=False)
    plan = steps.cache.plan(lookup, (), steps.seq, RequestStats(400))
    assert plan.cuts == ()
    assert plan.persist == ()
    assert plan.turn == 0
    assert steps.ram.snapshots() == []
    check_invariants(steps.ram)


def test_the_cache_of_a_model_is_a_page_to_read() -> None:
    """A new method belongs to the restorer, the saver or RAM, unless it needs all of them."""
    public = [name for name in vars(PrefixCache) if not name.startswith("_")]
    assert len(public) <= 12


def test_a_longer_prompt_evaluates_only_what_is_new() -> None:
    steps = Steps()
    steps.serve(prompt_of(1))
    again = longer(prompt_of(1), 2)
    stats = steps.serve(again)
    assert stats.n_cached == 400
    assert stats.n_evaluated == 200
    assert ends_of(again)[-1] == steps.seq.n


@pytest.mark.parametrize(
    ("boundaries", "n_system"), [((), 0), ((40,), 0), ((40, 60), 40), ((30, 40, 60), 30)]
)
def test_the_facts_of_a_chat_have_the_end_of_its_system_message(
    boundaries: tuple[int, ...], n_system: int
) -> None:
    """A single message is a task, which has no system message before it."""
    prompt = Prompt.from_ids(np.arange(64), boundaries)
    assert Steps().lookup(prompt).facts.n_system == n_system


def share_after(n_shared: int) -> float:
    """Return the share of prompts at the end of a conversation, expected at a half, after a prompt
    of 400 tokens whose first reply starts at 200, and one that has ``n_shared`` of its tokens.
    """
    steps = Steps()
    tokens = prompt_of(1).tokens
    boundaries = (100, 200, 300)
    steps.serve(Prompt(tokens, boundaries, headers=(200, 300)))
    other = np.concatenate((tokens[:n_shared], prompt_of(2, 200).tokens))
    steps.serve(Prompt(other, boundaries, headers=(200, 300)))
    return steps.ram.policy.continuations.share(0.5)


def test_a_cache_counts_the_prompts_that_go_on_at_the_end() -> None:
    assert share_after(400) > 0.5


def test_a_cache_counts_the_prompts_that_leave_a_conversation_before_its_end() -> None:
    assert share_after(250) < 0.5


def test_prompts_that_share_an_opening_alone_are_other_conversations() -> None:
    assert share_after(150) == 0.5
