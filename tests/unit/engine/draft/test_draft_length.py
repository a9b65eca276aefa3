"""Draft lengths follow their gain, drafts pause without gain, and losses stay within the budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.draft_length import MACHINES, TEXTS, Simulation
from pyctl.engine.draft import draft_length, step_widths
from pyctl.engine.draft.accepted_share import Origin
from pyctl.engine.draft.draft_length import LOSS, DraftLengthController
from pyctl.engine.draft.step_costs import BUDGET
from tests.effort import examples

SOME = Origin("some")
TEXT = Origin("some", 4)

Cost = Callable[[int], float]
"""The cost of a step, by tokens."""


@dataclass
class Run:
    """Time in plain steps, with drafts and without, and the lengths that were chosen."""

    time: float = 0.0
    plain: float = 0.0
    lengths: list[int] = field(default_factory=list)

    @property
    def slowdown(self) -> float:
        return self.time / self.plain


def line(slope: float) -> Cost:
    return lambda width: 1 + slope * (width - 1)


def measured(
    cost: Cost,
    *,
    limit: int = 64,
    n_seqs: int = 1,
    n_free: int = 1024,
    draft_ms: float = 0.0,
    has_state_history: bool = False,
) -> DraftLengthController:
    """Return a controller that has measured the costs of all widths, with 10 ms for a plain step of
    one request.
    """
    controller = DraftLengthController(n_free=n_free, has_state_history=has_state_history)
    for n in range(limit + 1):
        for _ in range(2):
            controller.costs(n_seqs).add(n_seqs * (1 + n), 10 * cost(n_seqs * (1 + n)))
            if n:
                controller.proposal_ms[n_seqs].add(n, n * draft_ms)
    return controller


def simulate(
    controller: DraftLengthController,
    cost: Cost,
    shares: Sequence[float],
    n_steps: int,
    limit: int = 3,
    *,
    n_seqs: int = 1,
    draft_ms: float = 0.0,
    origin: Origin = TEXT,
    seed: int = 0,
) -> Run:
    """Return the run of a simulated server; each stretch of 300 steps has the next of the
    ``shares`` of right drafts.
    """
    rng = random.Random(seed)
    run = Run()
    plain_ms = 10 * cost(n_seqs)
    for step in range(n_steps):
        share = shares[step // 300 % len(shares)]
        asked = [controller.length(key, origin, limit, n_seqs) for key in range(n_seqs)]
        asked = [max(asked)] * n_seqs if origin is SOME else asked
        right = [next((i for i in range(n) if rng.random() >= share), n) for n in asked]
        width = n_seqs + sum(asked)
        ms = 10 * cost(width)
        proposing_ms = draft_ms * max(asked) if origin is SOME else 0.0
        run.time += (ms + proposing_ms) / plain_ms
        run.plain += 1 + sum(right) / n_seqs
        run.lengths.append(max(asked))
        proposing = (max(asked), proposing_ms) if any(asked) and origin is SOME else None
        controller.record(dict(enumerate(right)), width, ms, proposing)
        for key, n in enumerate(asked):
            if origin is TEXT:  # what was not evaluated is compared all the same
                n = n or min(limit, 4)
                controller.learn(
                    key, origin, n, next((i for i in range(n) if rng.random() >= share), n)
                )
            elif n:
                controller.learn(key, origin, n, right[key])
    return run


def took(
    controller: DraftLengthController, origin: Origin, n: int, n_right: int, ms: float | None
) -> None:
    """Record a step of one request with ``n`` drafts."""
    controller.learn(0, origin, n, n_right)
    controller.record({0: n_right}, 1 + n, ms)


@settings(max_examples=examples(60))
@given(
    slope=st.floats(0, 1),
    shares=st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.7, 0.9, 1.0]), min_size=1, max_size=4),
    limit=st.integers(1, 64),
    n_seqs=st.integers(1, 4),
    draft_ms=st.sampled_from([0.0, 0.5, 5.0]),
    origin=st.sampled_from([SOME, TEXT]),
    seed=st.integers(0, 9),
)
def test_no_more_is_lost_than_the_budget(
    slope: float,
    shares: list[float],
    limit: int,
    n_seqs: int,
    draft_ms: float,
    origin: Origin,
    seed: int,
) -> None:
    """Whatever the acceptance, the costs and the load, a run with drafts takes no longer than one
    without, but for the share `LOSS`, the budget of trials and the last step.
    """
    cost = line(slope)
    controller = measured(cost, limit=limit, n_seqs=n_seqs, draft_ms=draft_ms)
    run = simulate(
        controller,
        cost,
        shares,
        900,
        limit,
        n_seqs=n_seqs,
        draft_ms=draft_ms,
        origin=origin,
        seed=seed,
    )
    last = n_seqs * (
        cost(n_seqs * (1 + limit)) + draft_ms * limit
    )  # requests of one step do not share its budget
    assert run.time <= run.plain * (1 + LOSS) + BUDGET + last


Adversary = Callable[[DraftLengthController, int], float]
"""The share of the drafts that it accepts, by the controller and the number of the step."""


def spoil(controller: DraftLengthController, step: int) -> float:
    """Accept all drafts until the budget is full, then none until it is empty."""
    return float(controller.costs(1).budget < BUDGET)


def trust(controller: DraftLengthController, step: int) -> float:
    """Accept all drafts as long as the controller takes to trust them, then none."""
    return float(step % 120 < 60)


@settings(max_examples=examples(60))
@given(
    slope=st.floats(0, 1),
    adversary=st.one_of(
        st.sampled_from([spoil, trust]),
        st.lists(st.floats(0, 1), min_size=1, max_size=40).map(
            lambda shares: lambda controller, step: shares[step % len(shares)]
        ),
    ),
    limit=st.integers(1, 64),
    draft_ms=st.sampled_from([0.0, 0.5, 5.0]),
    origin=st.sampled_from([SOME, TEXT]),
)
def test_no_adversary_takes_more_than_the_budget(
    slope: float, adversary: Adversary, limit: int, draft_ms: float, origin: Origin
) -> None:
    """The adversary chooses how many drafts are right after it has seen their number."""
    cost = line(slope)
    controller = measured(cost, limit=limit, draft_ms=draft_ms)
    costs = controller.costs(1)
    run = Run()
    for step in range(400):
        n = controller.length(0, origin, limit)
        n_right = int(adversary(controller, step) * n)
        proposing_ms = draft_ms * n if origin is SOME else 0.0
        run.time += cost(1 + n) + proposing_ms / 10
        run.plain += 1 + n_right
        proposing = (n, proposing_ms) if n and origin is SOME else None
        controller.record({0: n_right}, 1 + n, 10 * cost(1 + n), proposing)
        if n:
            controller.learn(0, origin, n, n_right)
        assert 0 <= costs.budget <= 2 * BUDGET
        last = cost(1 + limit) + draft_ms * limit / 10
        assert run.time <= run.plain * (1 + LOSS) + BUDGET + last


@settings(max_examples=examples(60))
@given(
    steps=st.lists(st.tuples(st.integers(0, 64), st.floats(0, 1), st.floats(0.1, 1e6)), max_size=60)
)
def test_the_budget_is_never_below_zero_whatever_a_step_takes(
    steps: list[tuple[int, float, float]],
) -> None:
    controller = measured(line(0.1))
    for n, share, ms in steps:
        took(controller, SOME, n, int(share * n), ms)
        assert 0 <= controller.costs(1).budget <= 2 * BUDGET


@pytest.mark.parametrize("slope", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("limit", [3, 64])
def test_what_is_never_right_pauses(slope: float, limit: int) -> None:
    run = simulate(measured(line(slope), limit=limit), line(slope), [0.0], 3000, limit, origin=SOME)
    assert run.slowdown < 1.03
    assert 0 < sum(n > 0 for n in run.lengths) < 300


def test_a_model_probes_for_several_replies_no_more_often_than_for_one() -> None:
    """Pauses of each reply ended at other steps, and each probe drafted for all."""
    n_steps = []
    for n_seqs in (1, 4):
        cost = line(0.6 / n_seqs)
        controller = measured(cost, limit=3, n_seqs=n_seqs)
        run = simulate(controller, cost, [0.3], 1500, n_seqs=n_seqs, origin=SOME)
        n_steps.append(sum(n > 0 for n in run.lengths))
    for_one, for_four = n_steps
    assert 0 < for_four <= for_one


def test_a_probe_ends_where_no_share_of_right_drafts_would_pay() -> None:
    """All of them are right, and would keep the probe going."""
    cost = line(1.2)
    run = simulate(measured(cost, limit=3), cost, [1.0], 1500, origin=SOME)
    probes = [sum(1 for _ in steps) for drafts, steps in groupby(run.lengths, bool) if drafts]
    assert probes
    assert set(probes) == {draft_length.PROBE_STEPS}


def test_disturbed_steps_do_not_stop_a_model_that_pays() -> None:
    """Two steps of a probe that took twice as long ended it, and the next one was far away."""
    machine = next(each for each in MACHINES if each.name == "35B-A3B, H200, 2 cores")
    text = next(each for each in TEXTS if each.name.endswith("steps disturbed"))
    for seed in range(2):
        plain = Simulation(machine, text, seed, 0).ms()
        assert Simulation(machine, text, seed, None).ms() < plain / 1.3


def test_drafts_of_one_reply_do_not_end_the_probe_of_several() -> None:
    controller = measured(line(0.3), limit=3, n_seqs=2)
    for _ in range(20):
        controller.learn(0, SOME, 3, 0)
    n_plain = 0
    while controller.length(0, SOME, 3, 2) == 0:
        controller.record({0: 0, 1: 0}, 2, 13.0)
        n_plain += 1
    assert 1 < n_plain < 1000
    controller.record({0: 2, 1: 2}, 6, 25.0)
    controller.learn(0, SOME, 3, 0)  # the other reply pauses meanwhile
    controller.record({0: 0}, 4, 19.0)
    assert controller.length(0, SOME, 3, 2) == draft_length.PROBE


@pytest.mark.parametrize("slope", [0.02, 1.2])
def test_a_model_that_pauses_for_some_replies_starts_with_a_pause_for_others(slope: float) -> None:
    controller = measured(line(slope), limit=3, n_seqs=4)
    pauses_for_four = controller.length(0, SOME, 3, 4) == 0
    for _ in range(4):
        controller.costs(3).add(3, 10.0)
    pauses_for_three = controller.length(0, SOME, 3, 3) == 0
    assert pauses_for_four == pauses_for_three == (slope > 1)


def test_a_text_that_is_never_right_costs_nothing_once_that_is_known() -> None:
    run = simulate(measured(line(0.05)), line(0.05), [0.0], 1000, 64)
    assert not any(run.lengths[20:])


@pytest.mark.parametrize("shares", [(0.0, 1.0), (1.0, 0.0)])
def test_drafts_resume_when_they_pay_again(shares: Sequence[float]) -> None:
    run = simulate(measured(line(0.3)), line(0.3), shares, 600)
    first = run.lengths[:300]
    second = run.lengths[300:]
    good, bad = (second, first) if shares[1] else (first, second)
    assert sum(n == 3 for n in good) > 180
    assert sum(n > 0 for n in bad) < 90


@pytest.mark.parametrize(
    ("slope", "share", "best"),
    [
        (0.02, 0.98, range(16, 65)),
        (0.1, 0.8, range(2, 9)),
        (0.3, 0.7, range(1, 4)),
        (0.9, 0.7, range(1)),
    ],
)
def test_the_length_is_the_one_that_pays_most(slope: float, share: float, best: range) -> None:
    run = simulate(measured(line(slope)), line(slope), [share], 2000, 64)
    assert sorted(run.lengths[-500:])[250] in best


def test_a_longer_match_gets_a_longer_draft_from_the_first_one_on() -> None:
    controller = measured(line(0.02), n_free=3)
    found = [controller.length(0, Origin.from_match("some", n), 64) for n in (2, 8, 32, 64)]
    assert found == sorted(found)
    assert found[0] <= 3 < found[-1]


def test_what_is_wrong_behind_few_matching_tokens_says_nothing_of_many() -> None:
    controller = measured(line(0.02), n_free=3)
    short = Origin.from_match("some", 4)
    long = Origin.from_match("some", 64)
    for _ in range(40):
        took(controller, short, 3, 0, 10.6)
        took(controller, long, 64, 64, 22.8)
    assert controller.length(0, long, 64) == 64
    assert controller.length(0, short, 64) in (0, draft_length.PROBE)


def test_a_draft_is_evidence_up_to_as_many_tokens_as_matched() -> None:
    """Behind more right ones its tokens are those of a longer match."""
    runs = []
    for right in (4, 64):
        controller = measured(line(0.1))
        for _ in range(20):
            took(controller, TEXT, 64, right, 74.0)
        runs.append(controller.gain(0, TEXT, 8))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("n_right", "kept"), [(16, (0.8, 1.0)), (2, (0.0, 0.5))])
def test_a_copy_that_goes_on_shares_the_cost_of_a_new_graph(
    n_right: int, kept: tuple[float, float]
) -> None:
    gains = []
    long = Origin.from_match("some", 64)
    for graph in (0.0, 4.0):
        controller = measured(line(0.01))
        controller.costs(1).graph_ms = 10 * graph
        for _ in range(60):
            took(controller, long, 16, n_right, 11.6)
        gains.append(controller.gain(0, long, 32))
    minimum, maximum = kept
    assert minimum < gains[1] / gains[0] < maximum


def test_a_model_starts_after_plain_steps_where_one_draft_gains() -> None:
    """At two tokens a step on 35B-A3B one draft gains 9 % once its CUDA graph is captured, which
    takes as long as 2.6 plain steps: enough of these share it.
    """
    costs = {1: 1.0, 2: 1.23, 3: 1.45, 4: 1.65}
    controller = measured(costs.__getitem__, limit=3, draft_ms=1.87)
    graph_ms = 26.4
    controller.costs(1).graph_ms = graph_ms
    for i in range(110):
        took(controller, SOME, 1, int(i % 11 < 6), 12.3)
    first_of_a_width = 10.0 + step_widths.GRAPH_SHARES[0] * graph_ms
    controller.record({0: 0}, 1, first_of_a_width)
    assert controller.length(0, SOME, 3) == 1
    assert 1.04 < controller.gain(0, SOME, 1) < 1.06


def beside_others(*, has_state_history: bool, apart: float = 1.5) -> DraftLengthController:
    """Return a controller of 4 requests: wide drafts, and tokens evaluated again, take ``apart``
    plain steps where they are separate.
    """
    controller = measured(
        line(0.05), limit=9, n_seqs=4, n_free=3, has_state_history=has_state_history
    )
    for n in 3 * (8, 16, 24) if has_state_history else ():
        controller.record_batches([(1, 2)] * 3 + [(1, n - 1)])
        controller.record(dict.fromkeys(range(4), 2), 9 + n, 14 + 11.5 * apart)
    return controller


def test_a_wide_copy_is_charged_for_the_evaluation_that_others_wait_for() -> None:
    few = Origin.from_match("some", 16)
    many = Origin.from_match("some", 64)
    model = Origin("head")
    shared = beside_others(has_state_history=False)
    apart = beside_others(has_state_history=True)
    assert shared.length(0, few, 16, 4) > 3 >= apart.length(0, few, 16, 4)
    assert apart.costs(4).second(16) == pytest.approx(1.5)
    assert apart.costs(4).shared(25) == pytest.approx(2.2 / 1.15)
    assert apart.model_beats_text(0, model, 2, many, 16, 4)
    assert not shared.model_beats_text(0, model, 2, many, 16, 4)


def test_a_wide_copy_that_is_worth_a_second_evaluation_is_tried() -> None:
    controller = beside_others(has_state_history=True, apart=1.1)
    copy = Origin.from_match("some", 64)
    assert controller.length(0, copy, 64, 4) > 16
    assert not controller.model_beats_text(0, Origin("head"), 2, copy, 32, 4)


def test_a_draft_is_as_long_as_the_budget_allows() -> None:
    controller = measured(line(0.3))
    long = Origin.from_match("some", 64)
    for _ in range(12):
        took(controller, long, 4, 4, 22.0)
    controller.costs(1).budget = 4.0
    assert 0 < controller.length(0, long, 64) * 0.3 <= 4.0


def test_the_time_to_draft_counts() -> None:
    run = simulate(
        measured(line(0.05), draft_ms=20.0), line(0.05), [1.0], 2000, draft_ms=20.0, origin=SOME
    )
    assert sum(n > 0 for n in run.lengths) < 60


def test_drafts_that_are_evaluated_again_are_kept_short() -> None:
    free = simulate(measured(line(0.1)), line(0.1), [0.75], 1500, 16)
    dear = simulate(measured(line(0.1), n_free=3), line(0.1), [0.75], 1500, 16)
    assert sorted(free.lengths[-500:])[250] > 3
    assert sorted(dear.lengths[-500:])[250] == 3


def test_a_request_begins_with_plain_steps_that_are_measured() -> None:
    controller = DraftLengthController()
    for ms in (None, 10.0, 10.0):
        assert controller.length(0, SOME, 3) == 0
        controller.record({0: 0}, 1, ms)
    assert controller.length(0, SOME, 3) == 3


def test_plain_steps_are_measured_anew() -> None:
    """Costs grow with the context, and drafts in each step would hide that."""
    controller = measured(line(0.1))
    n_plain = 0
    for step in range(4000):
        n = controller.length(0, SOME, 3)
        n_plain += n == 0
        ms = 10 + step / 200
        took(controller, SOME, n, n, ms * (1 + 0.1 * n))
    assert 10 < n_plain < 40
    assert controller.costs(1).plain_ms == pytest.approx(ms, rel=0.15)


def test_a_step_with_a_prompt_measures_nothing() -> None:
    controller = measured(line(0.1), draft_ms=0.5)
    for key in range(20):
        assert controller.length(key, SOME, 3) == 3
        controller.learn(key, SOME, 3, 3)
        controller.record({key: 3}, 4, None, (3, 400.0))
    assert controller.length(20, SOME, 3) == 3


@pytest.mark.parametrize(("share", "n_drafting"), [(1.0, range(80, 101)), (0.0, range(20))])
def test_what_was_disturbed_at_the_start_is_measured_by_probes(
    share: float, n_drafting: range
) -> None:
    controller = measured(lambda width: 1 + 3 * (width > 1), draft_ms=2.0)
    run = simulate(controller, line(0.1), [share], 400, draft_ms=0.5, origin=SOME)
    assert sum(n > 0 for n in run.lengths[-100:]) in n_drafting


def test_slow_steps_after_a_new_width_are_no_measurement() -> None:
    controller = measured(line(0.1))
    controller.costs(1).graph_ms = 16.0
    for _ in range(12):
        for ms in (15.0, 23.0, 10.0, 10.0):
            controller.record({0: 0}, 1, ms)
        for ms in (16.0, 24.0, 11.0):
            took(controller, SOME, 1, 1, ms)
    assert controller.costs(1).plain_ms == 10.0
    assert controller.costs(1).shared(2) == pytest.approx(1.1)


def test_the_same_calls_have_the_same_answers() -> None:
    runs = [
        simulate(measured(line(0.1), n_seqs=3), line(0.1), [0.7], 400, 32, n_seqs=3, seed=3)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_requests_are_forgotten() -> None:
    controller = measured(line(0.1))
    simulate(controller, line(0.1), [0.7], 50)
    controller.end(0)
    assert not controller.requests
