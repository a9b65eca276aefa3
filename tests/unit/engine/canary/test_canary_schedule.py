"""When checks are due, and how much of a day they take."""

from __future__ import annotations

import pytest

from pyctl.engine.canary.canary_limits import QUIET_SECONDS, CanaryLimits
from pyctl.engine.canary.canary_schedule import DAY_SECONDS, CanarySchedule
from tests.unit.engine.drive import ManualClock

HOUR = 3600


def schedule(interval: float = HOUR, **limits: float) -> tuple[CanarySchedule, ManualClock]:
    clock = ManualClock()
    return CanarySchedule(interval, CanaryLimits(**limits), clock), clock


def test_a_check_is_due_an_interval_after_the_start_and_after_each_check() -> None:
    times, clock = schedule()
    assert times.seconds == HOUR
    clock.advance(HOUR)
    assert times.seconds == 0
    times.finish()
    assert times.seconds == HOUR


def test_an_interrupted_check_stays_due() -> None:
    times, clock = schedule()
    clock.advance(HOUR + 100)
    times.spend(1.0)
    assert times.seconds == 0


def test_without_an_interval_no_check_is_ever_due() -> None:
    times, clock = schedule(0)
    clock.advance(10 * DAY_SECONDS)
    assert times.seconds is None


def test_a_used_up_day_moves_the_next_check_to_the_next_day() -> None:
    times, clock = schedule(a_day=3.0)
    clock.advance(HOUR)
    times.spend(2.0)
    times.finish()
    assert times.seconds == HOUR
    times.spend(1.0)
    assert times.seconds == DAY_SECONDS - HOUR
    clock.advance(DAY_SECONDS - HOUR)
    assert times.seconds == 0
    assert times.left_today == 3.0
    assert times.spent == 3.0, "the sum goes on"


@pytest.mark.parametrize(
    ("seconds", "may"), [(0.0, True), (4.0, True), (4.1, False), (100.0, False)]
)
def test_a_check_may_not_take_more_than_its_limit(seconds: float, may: bool) -> None:
    times, _ = schedule(a_check=4.0)
    assert times.may_take(seconds) is may


def test_a_short_interval_shortens_the_quiet_time() -> None:
    assert schedule()[0].quiet == QUIET_SECONDS
    assert schedule(1)[0].quiet == 1
