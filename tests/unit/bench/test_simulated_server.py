"""The simulated server: its clock, and the bytes of a day that its disk gets."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from bench.gpu_seconds import DEVICES
from bench.traces.simulated_server import (
    MIDNIGHT,
    SCALE,
    Card,
    SimulatedServer,
    VirtualClock,
)
from pyctl.prompt import Prompt, as_tokens

STATE_BYTES = 2**26
GIB = 2**30
DAY = 86_400.0


def server(directory: Path, clock: VirtualClock, *, daily_bytes: int = 0) -> SimulatedServer:
    """Return a server with 64 MiB for each state and 34 KiB for each row."""
    sizes = 131_072, 34_816, STATE_BYTES, 16 * GIB, 16 * GIB, daily_bytes
    return SimulatedServer(Card(DEVICES[-1], *sizes), directory, clock)


def chat(seed: int, n: int = 4_000) -> Prompt:
    """Return a prompt of two messages."""
    tokens = np.random.default_rng(seed).integers(1_000, 150_000, size=n, dtype=np.int32)
    return Prompt(as_tokens(tokens), (n // 2, n - 3), (n - 3,), n - 3)


def n_written(made: SimulatedServer) -> int:
    """Return the bytes of the model that the disk has written."""
    assert made.disk is not None
    return made.disk.queue.written.n_bytes * SCALE


def test_the_clock_goes_only_forward_and_maps_real_time() -> None:
    clock = VirtualClock()
    before = time.monotonic()
    clock.advance_to(10.0)
    clock.advance_to(5.0)
    assert clock() == MIDNIGHT + 10.0
    assert clock.at(before) == MIDNIGHT
    assert clock.at(time.monotonic()) == MIDNIGHT + 10.0


def test_files_count_with_all_bytes_of_the_model(tmp_path: Path) -> None:
    clock = VirtualClock()
    made = server(tmp_path, clock)
    made.answer(chat(1), as_tokens([1, 2]))
    made.answer(chat(1), as_tokens([1, 2]))
    made.close()
    whole = 4_000 * 34_816 + STATE_BYTES
    assert 0.9 * whole < n_written(made) < 4 * whole


def test_the_bytes_of_a_day_end_and_come_again_at_midnight(tmp_path: Path) -> None:
    clock = VirtualClock()
    made = server(tmp_path, clock, daily_bytes=GIB // 2)
    for seed in range(8):
        made.answer(chat(seed), as_tokens([1, 2]))
        made.answer(chat(seed), as_tokens([1, 2]))
    today = n_written(made)
    assert 0 < today <= GIB // 2
    made.answer(chat(8), as_tokens([1, 2]))
    made.answer(chat(8), as_tokens([1, 2]))
    assert n_written(made) == today
    clock.advance_to(DAY)
    made.answer(chat(9), as_tokens([1, 2]))
    made.answer(chat(9), as_tokens([1, 2]))
    assert n_written(made) > today
    made.close()


def test_an_idle_server_copies_the_rows_of_the_device(tmp_path: Path) -> None:
    made = server(tmp_path, VirtualClock())
    made.answer(chat(1), as_tokens([1, 2]))
    only_held = made.cache.held.only_held
    assert only_held()
    made.idle(1.0)
    assert only_held()
    made.idle(60.0)
    assert not only_held()
    made.close()
