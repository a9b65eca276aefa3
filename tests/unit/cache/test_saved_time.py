"""The estimate of the time that restored tokens saved."""

from __future__ import annotations

import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.saved_time import MEMORY_TOKENS, MIN_TOKENS, PrefillSpeed, Saved, SavedTime

RESTORE_MS = 200.0


def request(n_cached: int, n_evaluated: int) -> RequestStats:
    """Return a request whose lookup and restore took `RESTORE_MS` if it restored anything."""
    source = "ram" if n_cached else "none"
    stats = RequestStats(n_cached + n_evaluated, source, n_cached, n_evaluated)  # type: ignore[arg-type]
    if n_cached:
        stats.lookup_ms = RESTORE_MS / 4
        stats.restore_ms = RESTORE_MS * 3 / 4
    return stats


def test_a_request_is_measured_by_its_own_speed() -> None:
    """500 tokens in a second: 1,000 restored ones would have taken two, of which the restore took
    0.2.
    """
    reports: list[tuple[Saved, float]] = []
    account = SavedTime(report=lambda saved, speed: reports.append((saved, speed)))
    assert account.count(request(1000, 500), 1000 + RESTORE_MS, is_alone=True) == pytest.approx(1.8)
    ((saved, speed),) = reports
    assert saved.tokens == 1000
    assert saved.requests == 1
    assert saved.seconds == pytest.approx(1.8)
    assert speed == pytest.approx(500)


def test_a_slow_restore_of_a_short_rest_saves_what_it_saved() -> None:
    """66 tokens in 0.3 s after a restore of 2.7 s are no measure: the engine's 250 tokens a second
    are.
    """
    account = SavedTime()
    account.count(request(0, 7500), 30_000, is_alone=True)
    stats = request(6909, 66)
    stats.lookup_ms = 0.0
    stats.restore_ms = 2700.0
    assert account.count(stats, 3000, is_alone=True) == pytest.approx(6909 / 250 - 2.7)


def test_other_requests_on_the_device_are_no_measure() -> None:
    account = SavedTime()
    account.count(request(0, 1000), 1000, is_alone=True)
    assert account.count(request(5000, 512), 60_000, is_alone=False) == pytest.approx(
        5.0 - RESTORE_MS / 1e3
    )
    assert account.count(request(5000, 0), RESTORE_MS, is_alone=True) == pytest.approx(
        5.0 - RESTORE_MS / 1e3
    )


def test_the_speed_of_an_earlier_run_measures_the_first_request() -> None:
    assert SavedTime(known=500.0).count(request(1000, 66), 5000, is_alone=True) == pytest.approx(
        2.0 - RESTORE_MS / 1e3
    )


def test_short_prompts_are_measured_until_there_is_a_long_one() -> None:
    speed = PrefillSpeed()
    assert speed.tokens_per_second == 0.0
    assert speed.measured == 0.0
    speed.record(50, 0.5)
    assert speed.tokens_per_second == 100.0
    assert speed.measured == 0.0
    speed.record(MIN_TOKENS, MIN_TOKENS / 1000)
    speed.record(50, 0.5)
    assert speed.tokens_per_second == speed.measured == pytest.approx(1000.0)


def test_old_measurements_fade() -> None:
    speed = PrefillSpeed()
    speed.record(MEMORY_TOKENS, MEMORY_TOKENS / 1000)
    for _ in range(20):
        speed.record(MEMORY_TOKENS // 4, MEMORY_TOKENS / 4 / 100)
    assert speed.tokens_per_second == pytest.approx(100.0, rel=0.1)


@pytest.mark.parametrize("prompt_ms", [0.0, -5.0, RESTORE_MS])
def test_nothing_negative_and_nothing_endless_is_saved(prompt_ms: float) -> None:
    account = SavedTime()
    assert account.count(request(1000, 500), prompt_ms, is_alone=True) == 0.0
    account.count(request(0, 1000), 1.0, is_alone=True)
    assert (
        account.count(request(100, 500), prompt_ms, is_alone=True) == 0.0
    )  # restoring took longer
