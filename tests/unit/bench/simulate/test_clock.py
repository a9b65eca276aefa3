"""The simulation's clock."""

from __future__ import annotations

import time

from bench.simulate.clock import START, SimulatedClock


def test_only_looks_and_advances_let_time_pass() -> None:
    clock = SimulatedClock()
    assert clock.now == 0.0
    clock.advance(5.0)
    assert clock.now == 5.0
    assert clock() > 5.0
    assert clock.epoch() == START + clock.now


def test_a_jump_sets_the_time_of_the_day_alone() -> None:
    clock = SimulatedClock()
    clock.jump(-3600.0)
    assert clock.now == 0.0
    assert clock.epoch() == START - 3600.0


def test_the_process_reads_it_while_it_is_installed() -> None:
    clock = SimulatedClock()
    clock.advance(77.0)
    real = time.monotonic
    with clock.installed():
        assert 77.0 < time.monotonic() < time.perf_counter() < 77.1
        assert time.time() == clock.epoch()
    assert time.monotonic is real
