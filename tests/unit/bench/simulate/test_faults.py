"""Decisions about faults, and the log of events."""

from __future__ import annotations

import random

import pytest

from bench.simulate.faults import FAULTS, EventLog, Faults, KilledError, StepReachedError


def make(rate: float = 0.0) -> Faults:
    faults = Faults(random.Random(1), EventLog())
    faults.is_active = True
    faults.rate = rate
    return faults


def test_without_a_rate_nothing_fails_and_calls_are_counted() -> None:
    faults = make()
    assert [faults.decide("read") for _ in range(100)] == [0] * 100
    assert faults.n_calls["read"] == 100


@pytest.mark.parametrize("kind", FAULTS)
def test_a_call_fails_with_the_errors_of_its_kind(kind: str) -> None:
    faults = make(1.0)
    assert {faults.decide(kind) for _ in range(200)} == set(FAULTS[kind])


def test_a_process_dies_at_the_change_that_was_chosen() -> None:
    faults = make()
    faults.kill_after(2)
    faults.decide("write")
    faults.decide("read")
    with pytest.raises(KilledError):
        faults.decide("sync")
    assert faults.decide("sync") == 0


def test_memory_lacks_at_its_rate() -> None:
    faults = make()
    faults.allocate()
    faults.memory_rate = 1.0
    with pytest.raises(MemoryError):
        faults.allocate()


def test_the_simulation_itself_meets_no_fault() -> None:
    faults = make(1.0)
    faults.memory_rate = 1.0
    faults.is_active = False
    assert faults.decide("write") == 0
    faults.allocate()


def test_the_digest_depends_on_each_event_and_its_order() -> None:
    digests = set()
    for events in (("a", "b"), ("b", "a"), ("a",), ("a", "b", "c")):
        log = EventLog()
        for event in events:
            log.add(event)
        digests.add(log.digest)
    assert len(digests) == 4


def test_a_log_is_over_at_its_last_step() -> None:
    log = EventLog(until=2)
    log.add("a")
    assert not log.is_over
    with pytest.raises(StepReachedError):
        log.add("b", "detail")
    assert log.is_over
    assert log.last == ["1 a", "2 b detail"]
