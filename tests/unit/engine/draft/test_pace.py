"""Drafting never costs more than it may, and gives what it can: simulated with costs and acceptances of all kinds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.engine.draft import pace as pace_module
from pyctl.engine.draft.pace import GRANT, LOSS, MOST_SAVED, Pace, PacedDraft
from pyctl.engine.draft.step_costs import N_WARM
from tests.effort import examples

Cost = Callable[[int], float]
Chance = Callable[[int, int], float]
"""Of a draft to be right, by the tokens there are so far and its position."""


@dataclass
class Run:
    """What a simulated server did; time is in plain steps of its requests."""

    time: float = 0.0
    plain: float = 0.0
    worst: float = 0.0  # most that was lost beyond LOSS at any time
    warm: float = 0.0  # what the first steps of each width took beyond a plain one
    lengths: list[int] = field(default_factory=list)

    @property
    def slowdown(self) -> float:
        return self.time / self.plain


def simulate(
    pace: Pace,
    cost: Cost,
    chance: Chance,
    n_steps: int,
    limit: int = 16,
    *,
    n_seqs: int = 1,
    n_free: int | None = None,
    draft_ms: float = 0.0,
    silent: float = 0.0,
    noise: float = 0.0,
    cold: float = 0.0,
    settling: Sequence[float] = (),
    together: bool = False,
    seed: int = 0,
) -> Run:
    """Steps of a server whose plain step for one request takes 10 ms and one of w tokens ``cost(w)`` of that.

    The first steps of a width take ``settling`` longer, in plain steps.
    """
    rng = random.Random(seed)
    run, plain_ms = Run(), 10 * cost(n_seqs)
    seen: Counter[tuple[str, int]] = Counter()
    again, n_tokens = [0] * n_seqs, [0] * n_seqs
    last_width, place = n_seqs, len(settling)
    for _ in range(n_steps):
        asked = [pace.most(key, "some", limit, n_seqs, n_free=n_free, together=together) for key in range(n_seqs)]
        asked = [max(asked)] * n_seqs if together else asked
        drafted = [n if n and rng.random() >= silent else 0 for n in asked]
        right = []
        for key, n in enumerate(drafted):
            accepted = 0
            while accepted < n and rng.random() < chance(n_tokens[key], accepted):
                accepted += 1
            right.append(accepted)
        width = sum(1 + more + n for more, n in zip(again, drafted, strict=True))
        lost = [n_free is not None and n > n_free and a < n for n, a in zip(drafted, right, strict=True)]
        again = [1 + a if gone else 0 for gone, a in zip(lost, right, strict=True)]
        seen["width", width] += 1
        seen["drafts", max(asked)] += 1
        ms = 10 * (cold if cold and 0 < seen["width", width] <= N_WARM and width > n_seqs else cost(width))
        place = place + 1 if width == last_width else 0
        last_width = width
        ms += settling[place] * plain_ms if place < len(settling) else 0.0
        proposing = draft_ms * sum(asked)
        run.time += (ms + proposing) / plain_ms
        if width > n_seqs and seen["width", width] <= N_WARM:
            run.warm += ms / plain_ms - 1
        if seen["drafts", max(asked)] <= N_WARM:
            run.warm += proposing / plain_ms
        run.plain += 1 + sum(right) / n_seqs
        run.worst = max(run.worst, run.time - run.warm - (1 + LOSS) * run.plain)
        run.lengths.append(max(drafted))
        entries = [
            PacedDraft(key, "some" if n else "", n, a) for key, (n, a) in enumerate(zip(drafted, right, strict=True))
        ]
        measured = ms * (1 + noise * rng.random())
        pace.settle(entries, width, measured, {"some": proposing} if proposing else {})
        n_tokens = [n + 1 + a for n, a in zip(n_tokens, right, strict=True)]
    return run


def line(slope: float) -> Cost:
    return lambda width: 1 + slope * (width - 1)


COSTS = st.one_of(
    st.floats(0, 1).map(line),
    st.floats(0, 1).map(lambda power: lambda width: float(width**power)),
    st.tuples(st.floats(0, 1), st.integers(1, 16)).map(lambda p: lambda width: 1 + p[0] * -(-(width - 1) // p[1])),
)
"""Wider steps cost no less, and two steps no less than one of both."""


@st.composite
def chances(draw: st.DrawFn) -> Chance:
    """Constant, falling with the position, or changing midway."""
    shares = draw(st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.7, 0.9, 1.0]), min_size=1, max_size=4))
    stretch, fall = draw(st.integers(50, 600)), draw(st.sampled_from([1.0, 0.95, 0.8]))
    return lambda n, position: shares[n // stretch % len(shares)] * fall**position


@settings(max_examples=examples(80), deadline=None)
@given(
    cost=COSTS,
    chance=chances(),
    limit=st.integers(1, 64),
    n_seqs=st.integers(1, 4),
    draft_ms=st.sampled_from([0.0, 0.5, 5.0]),
    silent=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 9),
)
def test_no_server_loses_more_than_it_may(
    cost: Cost, chance: Chance, limit: int, n_seqs: int, draft_ms: float, silent: float, seed: int
) -> None:
    run = simulate(*(Pace(), cost, chance, 800, limit), n_seqs=n_seqs, draft_ms=draft_ms, silent=silent, seed=seed)
    # What was granted at first, once. How long it takes to propose so many is not known before it was done.
    proposed = draft_ms * limit * n_seqs / 10
    assert run.worst <= GRANT + proposed + 1e-6
    assert run.time - run.warm <= run.plain + max(LOSS * run.plain, GRANT) + proposed + 1e-9


@pytest.mark.parametrize("cost", [line(0.0), line(0.05), line(0.3), line(1.0)])
@pytest.mark.parametrize("limit", [3, 6, 64])
@pytest.mark.parametrize("n_free", [None, 3, 0])
def test_nothing_right_from_start_to_end(cost: Cost, limit: int, n_free: int | None) -> None:
    run = simulate(Pace(), cost, lambda n, position: 0.0, 2000, limit, n_free=n_free)
    assert run.slowdown <= 1 + LOSS
    assert run.slowdown > 1 or cost(2) == 1.0  # it did try


def test_what_is_hopeless_is_hardly_tried() -> None:
    """The account allows 2 %; pauses that grow keep most of it."""
    run = simulate(Pace(), line(0.15), lambda n, position: 0.0, 10_000, 3)
    assert run.slowdown < 1.005


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_acceptance_that_changes_midway(first: float) -> None:
    """No half of it costs more than it may, and the good half is used although the other was bad."""
    pace, cost = Pace(), line(0.1)
    before = simulate(pace, cost, lambda n, position: first, 1000, 3)
    after = simulate(pace, cost, lambda n, position: 1 - first, 1000, 3)
    good, bad = (before, after) if first else (after, before)
    assert bad.slowdown <= 1 + LOSS
    assert good.slowdown < 0.36  # 1.3 / 4, and how long it takes to see it
    assert sum(n > 0 for n in bad.lengths) < 60


def test_a_stretch_never_costs_more_than_was_saved_for_it() -> None:
    pace = Pace()
    simulate(pace, line(0.3), lambda n, position: 1.0, 2000, 32)
    assert pace.balance <= MOST_SAVED
    run = simulate(pace, line(0.3), lambda n, position: 0.0, 500, 32)
    assert run.time <= (1 + LOSS) * run.plain + MOST_SAVED


@pytest.mark.parametrize(
    ("cost", "share", "best"),
    [
        (line(0.02), 0.98, range(16, 65)),
        (line(0.1), 0.8, range(2, 9)),
        (line(0.3), 0.7, range(1, 4)),
        (line(0.9), 0.7, range(1)),
    ],
)
def test_the_length_is_what_pays(cost: Cost, share: float, best: range) -> None:
    run = simulate(Pace(), cost, lambda n, position: share, 3000, 64)
    late = sorted(run.lengths[-500:])
    assert late[250] in best
    lengths = [0, *pace_module.LENGTHS]
    rates = [sum(share**i for i in range(n + 1)) / cost(1 + n) for n in lengths if n <= 64]
    assert 1 / run.slowdown >= 0.9 * max(rates)


MEASURED = {1: 12.97, 2: 13.7, 3: 16.2, 4: 19.0, 5: 20.5, 6: 22.8, 7: 25.2}
"""Milliseconds of steps of a 27B model on an H200, by width; each draft of its head takes 1.27."""


@pytest.mark.parametrize("share", [0.3, 0.54, 0.7, 0.8, 0.95])
def test_as_many_as_pay_on_a_real_device(share: float) -> None:
    def rate(n: int) -> float:
        return sum(share**i for i in range(n + 1)) / (MEASURED[1 + n] + 1.27 * n)

    pace = Pace()
    run = simulate(
        *(pace, lambda width: MEASURED[width] / MEASURED[1], lambda n, position: share, 3000, 6),
        draft_ms=1.27 * 10 / MEASURED[1],
    )
    best = max(rate(n) for n in range(7)) * MEASURED[1]
    assert 1 / run.slowdown >= 0.95 * best
    late = run.lengths[-500:]
    assert sum(a != b for a, b in pairwise(late)) < 100  # another width costs another graph


@pytest.mark.parametrize("limit", [1, 3, 6])
def test_what_loads_kernels_at_first_is_not_held_against_it(limit: int) -> None:
    run = simulate(Pace(), line(0.07), lambda n, position: 0.9, 20, limit, cold=10.0)
    assert all(run.lengths[-5:])
    run = simulate(Pace(), line(0.07), lambda n, position: 0.9, 1000, 64, cold=10.0)
    assert sum(n > 0 for n in run.lengths[500:600]) >= 95


GRAPHS = {"27b": ({1: 12.8, 2: 13.7, 3: 15.8, 4: 19.3}, 1.15), "35b-a3b": ({1: 4.75, 2: 5.45, 3: 6.15, 4: 7.4}, 0.7)}
"""Milliseconds of steps on an H200 by width, and of one draft of the head."""

SETTLING_MS = 4.5, 12.0
"""What the first two steps of a width take longer there: without a graph, and capturing one."""


def told(ms: dict[int, float], proposing_ms: float) -> Pace:
    """One that was told what was measured when the model was loaded, with plain steps of 10 ms."""
    pace, scale = Pace(), 10 / ms[1]
    for width, each in ms.items():
        pace.know_step(1, width, each * scale)
        if width > 1:
            pace.know_proposal("some", 1, width - 1, (width - 1) * proposing_ms * scale)
    pace.know_settling(1, SETTLING_MS[1] * scale)
    return pace


@pytest.mark.parametrize("shape", sorted(GRAPHS))
@pytest.mark.parametrize("share", [0.54, 0.83, 1.0])
def test_drafts_that_pay_are_made_although_each_change_of_their_number_is_dear(shape: str, share: float) -> None:
    ms, proposing_ms = GRAPHS[shape]
    best = max(sum(share**i for i in range(n + 1)) / (ms[1 + n] + n * proposing_ms) for n in range(4)) * ms[1]
    found, n_changes = [], 0
    for seed in range(8):
        run = simulate(
            *(told(ms, proposing_ms), lambda width: ms[width] / ms[1], lambda n, position: share, 200, 3),
            draft_ms=proposing_ms * 10 / ms[1],
            settling=[each / ms[1] for each in SETTLING_MS],
            together=True,
            seed=seed,
        )
        found.append(1 / run.slowdown)
        n_changes += sum(a != b for a, b in pairwise(run.lengths))
    assert sum(found) / len(found) >= 0.88 * best
    assert n_changes < 15 * len(found)


def test_changes_of_width_are_paid_from_the_account() -> None:
    """What is never right is tried, and each trial costs four slow steps besides."""
    ms, proposing_ms = GRAPHS["35b-a3b"]
    settling = [each / ms[1] for each in SETTLING_MS]
    pace = told(ms, proposing_ms)
    run = simulate(
        *(pace, lambda width: ms[width] / ms[1], lambda n, position: 0.0, 4000, 3),
        draft_ms=proposing_ms * 10 / ms[1],
        settling=settling,
        together=True,
    )
    assert run.time <= (1 + LOSS) * run.plain + GRANT
    assert run.slowdown <= 1 + 1.5 * LOSS


@pytest.mark.parametrize("shape", sorted(GRAPHS))
def test_a_short_reply_with_wrong_drafts_alone_loses_little(shape: str) -> None:
    ms, proposing_ms = GRAPHS[shape]
    run = simulate(
        *(told(ms, proposing_ms), lambda width: ms[width] / ms[1], lambda n, position: 0.0, 256, 3),
        draft_ms=proposing_ms * 10 / ms[1],
        settling=[each / ms[1] for each in SETTLING_MS],
        together=True,
    )
    assert run.slowdown <= (1.05 if shape == "27b" else 1.1)


def test_a_few_wrong_drafts_at_first_do_not_do_away_with_longer_ones() -> None:
    """Of the shorter ones that follow, nothing would be learnt of what comes behind them."""
    ms, proposing_ms = GRAPHS["27b"]
    best = max(sum(0.8**i for i in range(n + 1)) / (ms[1 + n] + n * proposing_ms) for n in range(4)) * ms[1]
    found = []
    for seed in range(24):
        run = simulate(
            *(told(ms, proposing_ms), lambda width: ms[width] / ms[1], lambda n, position: 0.8, 400, 3),
            draft_ms=proposing_ms * 10 / ms[1],
            settling=[each / ms[1] for each in SETTLING_MS],
            together=True,
            seed=seed,
        )
        found.append(1 / run.slowdown / best)
    assert min(found) >= 0.9, found


def test_slow_steps_after_a_change_of_width_are_not_what_it_costs() -> None:
    pace = told({1: 10.0, 2: 11.0, 3: 12.0, 4: 14.0}, 0.2)
    entry = [PacedDraft(0, "some", 1, 1)]
    for _ in range(12):
        for ms in (15.0, 23.0, 10.0, 10.0):
            pace.settle([PacedDraft(0)], 1, ms)
        for ms in (16.0, 24.0, 11.0):
            pace.settle(entry, 2, ms, {"some": 0.2})
    costs = pace._costs[1]
    assert costs.plain_ms == 10.0
    assert costs.wider.of(2)[0] == pytest.approx(1.1)
    assert costs.change == pytest.approx((5 + 13) / 10, rel=0.1)


def test_drafting_for_many_at_once_says_nothing_of_drafting_for_one() -> None:
    pace = measured(4, {4: 10.0, 8: 12.0, 12: 14.0, 16: 16.0}, 0.1)
    pace.know_step(1, 1, 10.0)
    for _ in range(5):
        pace.settle([PacedDraft(0)], 1, 10.0)
    for _ in range(20):
        n = pace.most(9, "head", 3, together=True)
        pace.settle([PacedDraft(9, "head" if n else "", n, n)], 1 + n, 10.0 + n, {"head": 30.0} if n else {})
    assert [pace.most(key, "head", 3, 4, together=True) for key in range(4)] == [3] * 4


def test_the_time_to_draft_counts() -> None:
    """A head that takes as long as three tokens give does not pay, however right it is."""
    run = simulate(Pace(), line(0.05), lambda n, position: 1.0, 3000, 3, draft_ms=20.0)
    assert sum(n > 0 for n in run.lengths) < 60


def test_replays_count() -> None:
    """Drafts that have to be evaluated again are kept to what can be taken back for nothing."""
    free = simulate(Pace(), line(0.1), lambda n, position: 0.85, 2000, 16)
    dear = simulate(Pace(), line(0.1), lambda n, position: 0.85, 2000, 16, n_free=3)
    assert max(set(free.lengths[-500:]), key=free.lengths[-500:].count) > 3
    assert max(set(dear.lengths[-500:]), key=dear.lengths[-500:].count) == 3


def test_measurements_that_waver() -> None:
    for seed in range(5):
        run = simulate(Pace(), line(0.2), lambda n, position: 0.1, 3000, 8, noise=0.5, seed=seed)
        assert run.slowdown <= 1 + LOSS


def test_costs_that_grow_with_the_context_are_measured_anew() -> None:
    """With drafts all the time nobody sees plain steps, which have become three times as long."""
    pace, ms = Pace(), 10.0
    n_plain = 0
    for step in range(4000):
        n = pace.most(0, "some", 3)
        n_plain += n == 0
        ms = 10 + step / 200
        pace.settle([PacedDraft(0, "some", n, n)], 1 + n, ms * (1 + 0.1 * n))
    assert 4000 / pace_module.REMEASURE - 2 < n_plain < 40
    costs = pace._costs[1]
    assert costs.plain_ms == pytest.approx(ms, rel=0.1)


def test_a_step_in_which_something_else_was_done_measures_nothing() -> None:
    pace = Pace()
    for _ in range(5):
        pace.settle([PacedDraft(0)], 1, None)
    assert pace.most(0, "some", 3) == 0
    for _ in range(3):
        pace.settle([PacedDraft(0)], 1, 10.0)
    assert pace.most(0, "some", 3) == 3
    before = pace.balance
    pace.settle([PacedDraft(0, "some", 3, 0)], 4, None)
    assert pace.balance < before  # it cost something all the same


def measured(n_seqs: int, ms: dict[int, float], proposing_ms: float) -> Pace:
    """One that knows what steps of these widths take, and drafts of 1 to 3 tokens for each request."""
    pace = Pace()
    for n_tokens, each in sorted(ms.items()):
        pace.know_step(n_seqs, n_tokens, each)
    for n in (1, 2, 3):
        pace.know_proposal("head", n_seqs, n, n * proposing_ms)
    for _ in range(2):
        pace.settle([PacedDraft(key) for key in range(n_seqs)], n_seqs, ms[n_seqs])
    return pace


def test_drafting_beside_a_prompt_says_nothing_of_its_cost() -> None:
    pace = measured(1, {1: 10.0, 2: 11.0, 3: 12.0, 4: 13.0}, 0.5)
    for key in range(20):
        assert pace.most(key, "head", 3) == 3
        pace.settle([PacedDraft(key, "head", 3, 3)], 4, None, {"head": 400.0})
    assert pace.most(20, "head", 3) == 3


def test_what_all_draft_together_costs_what_it_costs_together() -> None:
    # The first few tokens more are the dear ones, as where a device takes other kernels for wide batches.
    for together, chosen in ((True, 3), (False, 0)):
        pace = measured(4, {4: 10.0, 8: 20.0, 12: 20.0, 16: 20.0}, 0.1)
        asked = [pace.most(key, "head", 3, 4, together=together) for key in range(4)]
        assert asked[0] == chosen, (together, asked)


@pytest.mark.parametrize(("accepted", "chosen"), [(3, 3), (0, 0)])
def test_costs_that_something_disturbed_before_the_first_request_are_tried(accepted: int, chosen: int) -> None:
    # All of them four times as long as they are: another program used the device meanwhile.
    pace, costs = measured(1, {1: 10.0, 2: 44.0, 3: 48.0, 4: 52.0}, 20.0), {1: 10.0, 2: 11.0, 3: 12.0, 4: 13.0}
    asked = []
    for _ in range(60):
        asked.append(n := pace.most(0, "head", 3, together=True))
        entry = PacedDraft(0, "head", n, min(n, accepted)) if n else PacedDraft(0)
        pace.settle([entry], 1 + n, costs[1 + n], {"head": 0.5 * n} if n else {})
    assert asked[-40:].count(chosen) > 30
    assert pace.balance > 0


def test_the_same_calls_have_the_same_answers() -> None:
    runs = [simulate(Pace(), line(0.1), lambda n, position: 0.7, 500, 32, n_seqs=3, seed=3) for _ in range(2)]
    assert runs[0] == runs[1]


def test_fixed_is_always_as_many_as_may_be() -> None:
    run = simulate(Pace(fixed=True), line(1.0), lambda n, position: 0.0, 50, 5)
    assert set(run.lengths) == {5}


def test_requests_are_forgotten() -> None:
    pace = Pace()
    simulate(pace, line(0.1), lambda n, position: 0.7, 50, n_seqs=4)
    for key in range(4):
        pace.end(key)
    assert not pace._courses
    assert not pace._begun


def test_what_was_measured_before_is_known_from_the_first_request_on() -> None:
    pace = Pace()
    for n_seqs in (1, 4):
        for n in range(4):
            for ms in (12.0, 10.0):  # the lower counts
                pace.know_step(n_seqs, n_seqs * (1 + n), ms * (1 + 0.1 * n))
    pace.know_proposal("head", 1, 3, 1.0)
    for n_seqs in (1, 4):
        # Plain steps first, since there was no context before; what disturbs one of them is not believed.
        for ms in (60.0, 20.0):
            assert [pace.most(key, "head", 3, n_seqs) for key in range(n_seqs)] == [0] * n_seqs
            pace.settle([PacedDraft(key) for key in range(n_seqs)], n_seqs, ms)
        assert [pace.most(key, "head", 3, n_seqs) for key in range(n_seqs)] == [3] * n_seqs
        # Wide steps count from the first on.
        pace.settle([PacedDraft(key, "head", 3, 3) for key in range(n_seqs)], 4 * n_seqs, 26.0, {"head": 1.0})
    assert pace._costs[1].wider.is_measured(4)
    assert not Pace()._costs


def test_what_disturbs_steps_now_and_then_is_not_charged() -> None:
    """Another program, a graph that is captured: one step in ten takes thirty times as long."""
    pace, n_drafted = Pace(), 0
    for step in range(1000):
        n = pace.most(0, "head", 3)
        n_drafted += n > 0
        ms = (10 + 0.7 * n) * (30 if step % 10 == 7 else 1)
        pace.settle([PacedDraft(0, "head" if n else "", n, n if step % 5 else 0)], 1 + n, ms)
    assert n_drafted > 950
    assert pace.balance > GRANT
