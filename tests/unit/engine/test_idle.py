"""The order and the due times of idle tasks."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from pyctl.cache import AGAIN_SECONDS
from pyctl.engine.engine import Engine
from pyctl.engine.idle import IDLE_SECONDS, PREPARE_SECONDS, IdleTasks
from tests.unit.engine.drive import ManualClock


class Bench:
    """Idle tasks of an engine that only counts what it is called for."""

    def __init__(self, sleep_seconds: float = -1) -> None:
        self.clock = ManualClock()
        self.engine: Any = Mock(spec=Engine)
        self.engine.clock = self.clock
        self.engine.asleep = self.engine.can_prepare = False
        self.engine.prewarms = Mock(seconds=None)
        self.engine.prefix_cache = Mock(disk=None)
        self.engine.prefix_cache.copy_next.return_value = False
        self.engine.scheduler = Mock(has_work=False)
        self.tasks = IdleTasks(self.engine, sleep_seconds)


def test_without_a_task_the_thread_waits_for_requests() -> None:
    assert Bench().tasks.seconds is None


def test_a_copy_is_due_a_while_after_the_last_client() -> None:
    bench = Bench()
    bench.tasks.restart()
    assert bench.tasks.seconds == IDLE_SECONDS
    bench.clock.advance(IDLE_SECONDS)
    assert bench.tasks.seconds == 0
    assert not bench.tasks.run_due()
    bench.engine.prefix_cache.copy_next.assert_called_once()
    assert bench.tasks.seconds is None, "there is no more to copy"


def test_what_is_left_to_copy_is_due_at_once() -> None:
    bench = Bench()
    bench.engine.prefix_cache.copy_next.return_value = True
    bench.tasks.restart()
    bench.clock.advance(IDLE_SECONDS)
    bench.tasks.run_due()
    assert bench.tasks.seconds == 0


def test_background_work_does_not_delay_the_copy() -> None:
    bench = Bench()
    bench.tasks.restart()
    bench.clock.advance(IDLE_SECONDS / 2)
    bench.tasks.is_background = True
    bench.tasks.restart()
    assert bench.tasks.seconds == IDLE_SECONDS / 2


def test_a_background_request_starts_after_the_copy() -> None:
    bench = Bench()
    bench.engine.prewarms.seconds = 0.0
    bench.tasks.restart()
    bench.clock.advance(IDLE_SECONDS)
    assert not bench.tasks.run_due(), "the copy comes first"
    assert bench.tasks.run_due()
    assert bench.tasks.is_background


def test_the_model_is_unloaded_after_its_time_and_stays_so() -> None:
    bench = Bench(sleep_seconds=60.0)
    assert bench.tasks.seconds == 60.0
    bench.clock.advance(60.0)
    assert not bench.tasks.run_due()
    bench.engine.sleep.assert_called_once()
    bench.engine.asleep = True
    assert bench.tasks.seconds is None


def test_writes_of_rows_that_only_the_device_has_come_before_unloading() -> None:
    bench = Bench(sleep_seconds=60.0)
    bench.engine.prefix_cache.disk = Mock()
    bench.engine.prefix_cache.disk.queue.is_moving = True
    bench.clock.advance(60.0)
    assert bench.tasks.seconds == pytest.approx(AGAIN_SECONDS)
    bench.tasks.run_due()
    bench.engine.sleep.assert_not_called()
    bench.engine.prefix_cache.disk.queue.is_moving = False
    bench.tasks.run_due()
    bench.engine.sleep.assert_called_once()


def test_kernels_are_loaded_after_a_moment() -> None:
    bench = Bench()
    bench.engine.can_prepare = True
    assert bench.tasks.seconds == PREPARE_SECONDS
    bench.clock.advance(PREPARE_SECONDS)
    assert not bench.tasks.run_due()
    bench.engine.prepare.assert_called_once()


def test_nothing_due_ends_background_work() -> None:
    bench = Bench()
    bench.tasks.is_background = True
    assert not bench.tasks.run_due()
    assert not bench.tasks.is_background


@pytest.mark.parametrize(
    ("is_background", "has_work", "n"),
    [(False, True, 0), (False, False, 1), (True, True, 1)],
)
def test_the_disk_gets_rows_at_once_unless_a_client_waits(
    is_background: bool, has_work: bool, n: int
) -> None:
    bench = Bench()
    bench.tasks.is_background = is_background
    bench.engine.scheduler.has_work = has_work
    bench.tasks.hand_over()
    assert bench.engine.prefix_cache.hand_over.call_count == n
