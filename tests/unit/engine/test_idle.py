"""The order and the due times of idle tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyctl.cache.ports import AGAIN_SECONDS
from pyctl.engine.idle import IDLE_SECONDS, PREPARE_SECONDS, IdleFacts, IdleSchedule, IdleTask
from tests.unit.engine.drive import ManualClock

LOADED = IdleFacts(is_asleep=False, needs_warm_up=False, is_writing=False, prewarm_seconds=None)


class Bench:
    """A schedule with a clock of its own."""

    def __init__(self, sleep_seconds: float = -1, quiet_seconds: float = 0.0) -> None:
        self.clock = ManualClock()
        self.schedule = IdleSchedule(sleep_seconds, self.clock, quiet_seconds=quiet_seconds)

    def seconds(self, facts: IdleFacts = LOADED) -> float | None:
        return self.schedule.seconds(facts)

    def after(self, seconds: float, facts: IdleFacts = LOADED) -> IdleTask | None:
        """Return the task that is due after so many more seconds."""
        self.clock.advance(seconds)
        return self.schedule.due_task(facts)


def test_without_a_task_the_thread_waits_for_requests() -> None:
    bench = Bench()
    assert bench.seconds() is None
    assert bench.after(3600.0) is None


def test_a_copy_is_due_a_while_after_the_last_client() -> None:
    bench = Bench()
    bench.schedule.restart()
    assert bench.seconds() == IDLE_SECONDS
    assert bench.after(IDLE_SECONDS / 2) is None
    assert bench.after(IDLE_SECONDS / 2) is IdleTask.COPY
    bench.schedule.record_copy(has_more=True)
    assert bench.seconds() == 0, "the rest follows at once"
    bench.schedule.record_copy(has_more=False)
    assert bench.seconds() is None


def test_background_work_does_not_delay_the_copy() -> None:
    bench = Bench()
    bench.schedule.restart()
    bench.clock.advance(IDLE_SECONDS / 2)
    bench.schedule.is_background = True
    bench.schedule.restart()
    assert bench.seconds() == IDLE_SECONDS / 2
    bench.clock.advance(IDLE_SECONDS)
    bench.schedule.restart()
    assert bench.seconds() == 0, "nor is it due before the end of that work"


def test_a_background_request_starts_after_the_copy() -> None:
    bench = Bench()
    waiting = replace(LOADED, prewarm_seconds=0.0)
    assert bench.after(0.0, waiting) is IdleTask.PREWARM
    bench.schedule.restart()
    assert bench.after(0.0, waiting) is IdleTask.PREWARM, "the copy is not due yet"
    assert bench.after(IDLE_SECONDS, waiting) is IdleTask.COPY
    bench.schedule.record_copy(has_more=False)
    assert bench.after(0.0, waiting) is IdleTask.PREWARM


def test_a_background_request_waits_for_its_time() -> None:
    assert Bench().seconds(replace(LOADED, prewarm_seconds=7.0)) == 7.0


def test_the_model_is_unloaded_after_its_time_and_stays_so() -> None:
    bench = Bench(sleep_seconds=60.0)
    assert bench.seconds() == 60.0
    assert bench.after(60.0) is IdleTask.SLEEP
    assert bench.seconds(replace(LOADED, is_asleep=True)) is None


def test_an_unloaded_model_has_nothing_to_copy() -> None:
    bench = Bench()
    bench.schedule.restart()
    assert bench.after(IDLE_SECONDS, replace(LOADED, is_asleep=True)) is None


def test_writes_of_rows_that_only_the_device_has_come_before_unloading() -> None:
    bench = Bench(sleep_seconds=60.0)
    writing = replace(LOADED, is_writing=True, prewarm_seconds=0.0)
    assert bench.after(60.0, writing) is None
    assert bench.seconds(writing) == pytest.approx(AGAIN_SECONDS)
    assert bench.after(0.0) is IdleTask.SLEEP


def test_kernels_are_loaded_after_a_moment() -> None:
    bench = Bench()
    ready = replace(LOADED, needs_warm_up=True)
    assert bench.seconds(ready) == PREPARE_SECONDS
    assert bench.after(PREPARE_SECONDS, ready) is IdleTask.PREPARE


def test_of_several_due_tasks_the_most_urgent_runs() -> None:
    bench = Bench(sleep_seconds=1.0)
    bench.schedule.restart()
    facts = replace(LOADED, needs_warm_up=True)
    assert bench.after(IDLE_SECONDS, facts) is IdleTask.SLEEP
    order = [
        IdleTask.PREWARM,
        IdleTask.SLEEP,
        IdleTask.COPY,
        IdleTask.PREPARE,
        IdleTask.CANARY,
    ]
    assert list(IdleTask) == order


def test_a_check_waits_for_its_time_and_for_quiet() -> None:
    bench = Bench(quiet_seconds=30.0)
    assert bench.seconds(replace(LOADED, canary_seconds=100.0)) == 100.0
    due = replace(LOADED, canary_seconds=0.0)
    bench.clock.advance(100.0)
    bench.schedule.restart()
    assert bench.after(29.0, due) is IdleTask.COPY
    bench.schedule.record_copy(has_more=False)
    assert bench.after(0.0, due) is None
    assert bench.after(1.0, due) is IdleTask.CANARY
    assert bench.after(0.0, replace(due, is_asleep=True)) is None
