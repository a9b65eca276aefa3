"""A disk that reads slowly or hangs: only the request that reads it waits, and no longer than a
limit.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyctl.cache.ram import RamCache
from pyctl.disk.disk import Disk
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.schedule.turns import TURN_SECONDS
from tests.fake import FakeBackend
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import (
    SLOW_SECONDS,
    ManualClock,
    Reply,
    ask,
    cold,
    collect,
    request,
    tier_on,
)
from tests.unit.engine.messages import KINDS, chat
from tests.waiting import until

STORED = chat((1, 300), (2, 240))
OTHER = chat((3, 200))


class HangingDrive:
    """Reads of ``hung`` ("pread": headers, "preadv": chunks) wait for ``gate`` once `hang` was
    called.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.waiting = threading.Event()
        self._patch = patch

    def hang(self, call: str, *, only: str = "") -> None:
        """Make ``call`` hang from now on, for the files whose names contain ``only``."""
        real: Callable[..., Any] = getattr(os, call)

        def slow(*args: Any) -> Any:
            if only in Path(os.readlink(f"/proc/self/fd/{args[0]}")).name:
                self.waiting.set()
                assert self.gate.wait(120)
            return real(*args)

        self._patch.setattr(os, call, slow)

    def answer(self, tier: Disk) -> None:
        """Answer everything from now on."""
        self._patch.undo()
        self.gate.set()
        until(lambda: not tier.directory.readers.is_busy)


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingDrive]:
    drive = HangingDrive(monkeypatch)
    yield drive
    drive.gate.set()


class StepClock:
    """A clock on which a turn takes some dozens of steps, however long these take."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        self._seconds += TURN_SECONDS / 64
        return self._seconds


def engine_on(
    directory: Path, kind: str = "hybrid", clock: Callable[[], float] = time.monotonic
) -> Engine:
    backend = FakeBackend(kind, n_seqs=2)
    settings = EngineSettings(exact=True)
    tier = tier_on(directory, clock=clock)
    return Engine(backend, RamCache(16, None), settings, tier, clock=StepClock())


def stored(
    directory: Path, kind: str = "hybrid", clock: Callable[[], float] = time.monotonic
) -> Engine:
    """Return an engine after a restart, whose cache directory has STORED; ``clock`` times its
    reads.
    """
    engine = engine_on(directory, kind)
    ask(engine, STORED)
    assert engine.prefix_cache.disk.flush(60)
    engine.prefix_cache.close()
    return engine_on(directory, kind, clock)


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """Return the result of ``work``, which must end in time."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, f"still at work after {seconds} s"
    return results[0]


def step_until(engine: Engine, handle: RequestHandle) -> Reply:
    reply = Reply("", [], None, None)
    while reply.done is None and reply.error is None:
        engine.step()
        more = collect(handle)
        reply = Reply(reply.text + more.text, reply.tokens + more.tokens, more.done, more.error)
    return reply


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_others_are_served_while_one_waits_for_the_disk(
    tmp_path: Path, drive: HangingDrive, kind: str, call: str
) -> None:
    """A request whose files hang does not delay another one. It resumes from the disk once the
    drive answers.
    """
    engine = stored(tmp_path, kind)
    drive.hang(call)
    slow = RequestHandle(request(STORED))
    quick = RequestHandle(request(OTHER))
    engine.submit(slow)
    within(60, engine.step)
    assert drive.waiting.wait(60)
    engine.submit(quick)
    reply = within(60, lambda: step_until(engine, quick))
    assert reply.tokens == cold(FakeBackend(kind), OTHER).tokens
    assert not drive.gate.is_set()
    drive.answer(engine.prefix_cache.disk)
    reply = within(60, lambda: step_until(engine, slow))
    assert reply.tokens == cold(FakeBackend(kind), STORED).tokens
    assert reply.done.stats.source == "disk"
    check_invariants(engine.prefix_cache.cache)
    engine.prefix_cache.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_stalled_read_is_a_miss_and_pauses_the_disk(
    tmp_path: Path, drive: HangingDrive, kind: str, call: str
) -> None:
    """A read that takes too long becomes a cold prefill, and the disk is left alone until the drive
    answers, so that the next request does not wait again. It is no damage.
    """
    clock = ManualClock()
    engine = stored(tmp_path, kind, clock)
    tier = engine.prefix_cache.disk
    expected = cold(FakeBackend(kind), STORED).tokens
    drive.hang(call)

    replied = threading.Event()

    def advance() -> None:
        """Let time pass until the reply: the request may look at the clock only later."""
        assert drive.waiting.wait(60)
        while not replied.wait(0.01):
            clock.advance(SLOW_SECONDS + 1)

    later = threading.Thread(target=advance)
    later.start()
    try:
        reply = within(60, lambda: ask(engine, STORED))
    finally:
        replied.set()
        later.join()
    assert reply.tokens == expected
    assert reply.done.stats.source == "none"
    assert tier.reader.is_stalled
    engine.prefix_cache.cache.clear()
    within(60, lambda: ask(engine, OTHER))
    assert within(60, lambda: ask(engine, STORED)).tokens == expected, (
        "no request waits a second time"
    )
    assert tier.reader.n_damaged == 0
    drive.answer(tier)
    assert not tier.reader.is_stalled
    engine.prefix_cache.cache.clear()
    for seed in (4, 5):
        ask(engine, chat((seed, 200)))
    reply = ask(engine, STORED)
    assert reply.tokens == expected
    assert reply.done.stats.source == "disk"
    check_invariants(engine.prefix_cache.cache)
    engine.prefix_cache.close()


@pytest.mark.parametrize(("kind", "only"), [*((kind, "") for kind in KINDS), ("hybrid", ".state")])
def test_a_request_that_is_cancelled_while_it_waits_leaves_an_empty_sequence(
    tmp_path: Path, drive: HangingDrive, kind: str, only: str
) -> None:
    """Also where it has all rows and waits for its state."""
    engine = stored(tmp_path, kind)
    drive.hang("preadv", only=only)
    handle = RequestHandle(request(STORED))
    engine.submit(handle)
    within(60, engine.step)
    while only and not any(held.rows for held in engine.backend.seqs):
        within(60, engine.step)
    assert drive.waiting.wait(60)
    handle.cancel()
    assert within(60, engine.step) is False
    assert not any(held.rows for held in engine.backend.seqs), "its cells are free"
    drive.answer(engine.prefix_cache.disk)
    assert all(seq.n == 0 for seq in engine.sequences)
    reply = ask(engine, STORED)
    assert reply.tokens == cold(FakeBackend(kind), STORED).tokens
    engine.prefix_cache.close()


def test_closing_does_not_wait_for_a_read_that_hangs(tmp_path: Path, drive: HangingDrive) -> None:
    engine = stored(tmp_path)
    drive.hang("preadv")
    engine.submit(RequestHandle(request(STORED)))
    within(60, engine.step)
    assert drive.waiting.wait(60)
    within(60, engine.prefix_cache.close)
    assert not drive.gate.is_set()


def test_a_state_that_the_model_refuses_is_no_longer_on_disk(tmp_path: Path) -> None:
    engine = stored(tmp_path)
    engine.backend.fail_loads = 1
    assert ask(engine, STORED).tokens == cold(FakeBackend("hybrid"), STORED).tokens
    assert engine.prefix_cache.disk.flush(60)
    assert engine.prefix_cache.disk.reader.n_damaged == 1
    engine.prefix_cache.close()
