"""Signs that the engine's thread hangs."""

from __future__ import annotations

import threading

import pytest

from pyctl.engine.watchdog import WATCH_SECONDS, ProgressWatch, StillThread
from tests.unit.engine.drive import ManualClock
from tests.waiting import until


def test_work_without_progress_is_a_stall() -> None:
    clock = ManualClock()
    watch = ProgressWatch(3.0, 0, clock)
    for seconds in (1.0, 2.0):
        clock.advance(1.0)
        assert not watch.is_stalled(0, is_working=True)
        assert watch.still_seconds == seconds
    clock.advance(1.0)
    assert watch.is_stalled(0, is_working=True)


@pytest.mark.parametrize(("sign", "is_working"), [(1, True), (0, False)])
def test_progress_and_idle_time_are_no_stall(sign: int, is_working: bool) -> None:
    clock = ManualClock()
    watch = ProgressWatch(2.0, 0, clock)
    clock.advance(1.5)
    assert not watch.is_stalled(0, is_working=True)
    clock.advance(1.5)
    assert not watch.is_stalled(sign, is_working=is_working)
    assert watch.still_seconds == 0.0


def test_without_a_limit_nothing_is_a_stall() -> None:
    clock = ManualClock()
    watch = ProgressWatch(0, 0, clock)
    for _ in range(1000):
        clock.advance(WATCH_SECONDS)
        assert not watch.is_stalled(0, is_working=True)


def test_a_stopped_machine_is_no_stall() -> None:
    clock = ManualClock()
    watch = ProgressWatch(60.0, 0, clock)
    clock.advance(3600.0)
    assert not watch.is_stalled(0, is_working=True)
    assert watch.still_seconds == 2 * WATCH_SECONDS


def test_a_thread_in_a_call_that_never_returns_is_still() -> None:
    clock, go_on = ManualClock(), threading.Event()
    thread = threading.Thread(target=go_on.wait, daemon=True)
    thread.start()
    still = StillThread(thread, clock)
    until(lambda: clock.advance(still.interval) or still.is_still())
    go_on.set()
    thread.join(60)
    assert not still.is_still(), "it has ended, which is another place"
