"""The disk tier under the engine, on the fake backend: restarts and failing disks."""

from __future__ import annotations

import itertools
import math
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pyctl.cache.device_limits import DeviceLimits
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Snapshot
from pyctl.disk.index import Index
from pyctl.disk.write_job import Writing
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.worker import Worker, WorkerTimes
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ask, cold, flushed, request, tier_on
from tests.unit.engine.messages import KINDS, chat
from tests.unit.server.fake import INFO


def engine_on(
    directory: Path,
    kind: str,
    policy: str = "full",
    n_slots: int = 32,
    settings: EngineSettings = EngineSettings(exact=True),
    **store: object,
) -> Engine:
    """Return a fresh engine and backend, as after a restart, on a cache directory."""
    tier = tier_on(directory, policy=policy, **store)
    return Engine(FakeBackend(kind), RamCache(n_slots, None), settings, tier)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("policy", "minimum"), [("full", 100), ("auto", 100), ("auto:2", 100), ("auto", 10**6)]
)
def test_each_turn_after_a_restart_goes_on_where_the_last_ended(
    tmp_path: Path, kind: str, policy: str, minimum: int
) -> None:
    """Also where the only conversation is too short for a disk: the last one never is."""
    messages = [(1, 300)]
    deepest = 0
    for turn in range(5):
        messages += [(100 + turn, 100), (200 + turn, 40)]
        prompt = chat(*messages)
        engine = engine_on(tmp_path, kind, policy, min_tokens=minimum)
        reply = ask(engine, prompt)
        stats = reply.done.stats
        assert reply.tokens == cold(FakeBackend(kind), prompt).tokens
        assert stats.n_cached == deepest
        assert stats.source == ("disk" if turn else "none")
        check_invariants(engine.prefix_cache.cache)
        deepest = prompt.end
        engine.prefix_cache.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["auto", "fixed"])
def test_a_prompt_that_was_not_finished_goes_on_after_a_restart(
    tmp_path: Path, kind: str, policy: str
) -> None:
    """From the last interim snapshot, the only one on disk, with the reply of a cold run."""
    prompt = chat((1, 300), (2, 900))
    ticks = itertools.count()
    tier = tier_on(tmp_path, policy="100" if policy == "fixed" else policy, interim_seconds=1.0)
    cache = RamCache(32, None)
    settings = EngineSettings(exact=True)
    killed = Engine(FakeBackend(kind), cache, settings, tier, clock=lambda: float(next(ticks)))
    handle = RequestHandle(request(prompt))
    killed.submit(handle)
    for _ in range(12):
        killed.step()
        flushed(killed)
    assert not handle.drain(), "the prompt is being evaluated"
    view = tier.view()
    assert view.interim.n >= 3
    assert view.interim == view.written
    assert len(tier.folder.lengths) <= 2, "each replaces the one before"
    deepest = max(tier.folder.lengths)
    engine = engine_on(tmp_path, kind)
    reply = ask(engine, prompt)
    assert reply.done.stats.source == "disk"
    assert reply.done.stats.n_cached == deepest
    assert reply.tokens == cold(FakeBackend(kind), prompt).tokens
    check_invariants(engine.prefix_cache.cache)


@pytest.mark.parametrize("policy", ["off", "auto"])
def test_a_request_that_wants_nothing_on_disk_has_no_interim_snapshots(
    tmp_path: Path, policy: str
) -> None:
    ticks = itertools.count()
    tier = tier_on(tmp_path, policy="auto", interim_seconds=1.0)
    engine = Engine(
        FakeBackend("hybrid"),
        RamCache(32, None),
        EngineSettings(),
        tier,
        clock=lambda: float(next(ticks)),
    )
    ask(engine, chat((1, 1200)), disk_policy=DiskPolicy.parse(policy))
    assert (flushed(engine).view().interim.n > 0) == (policy != "off")


@pytest.mark.parametrize("kind", KINDS)
def test_policy_full_writes_a_prompt_without_messages_while_the_server_runs(
    tmp_path: Path, kind: str
) -> None:
    prompt = Prompt.from_ids(np.random.default_rng(7).integers(1, 60, 900))
    killed = engine_on(tmp_path, kind, "full")
    expected = ask(killed, prompt).tokens
    assert killed.prefix_cache.disk.flush(60)
    engine = engine_on(tmp_path, kind, "full")
    reply = ask(engine, prompt)
    assert reply.tokens == expected
    assert reply.done.stats.source == "disk"
    assert reply.done.stats.n_cached == 896
    for each in (engine, killed):
        each.prefix_cache.close()


def test_the_deeper_tier_wins_and_ram_wins_a_tie(tmp_path: Path) -> None:
    engine = engine_on(tmp_path, "hybrid")
    long = chat((1, 300), (2, 240), (3, 240))
    ask(engine, long)
    assert engine.prefix_cache.disk.flush(60)
    ask(engine, chat((9, 300)))
    assert ask(engine, long).done.stats.source == "ram"
    engine.prefix_cache.cache.clear()
    ask(engine, chat((8, 300)))
    stats = ask(engine, long).done.stats
    assert stats.source == "disk"
    assert stats.n_cached == 780
    ask(engine, chat((7, 300)))
    assert ask(engine, long).done.stats.source == "ram", "what came from disk is in RAM now"
    check_invariants(engine.prefix_cache.cache)
    engine.prefix_cache.close()


def test_files_that_vanish_are_a_miss(tmp_path: Path) -> None:
    """Files that are deleted under the engine cost a cold prefill, never a reply: the lost snapshot
    is forgotten and written again.
    """
    prompt = chat((1, 300), (2, 240))
    engine = engine_on(tmp_path, "hybrid")
    expected = ask(engine, prompt).tokens
    engine.prefix_cache.close()
    for path in tmp_path.rglob("*.rows"):
        path.unlink()
    engine = engine_on(tmp_path, "hybrid")
    reply = ask(engine, prompt)
    assert reply.tokens == expected
    assert reply.done.stats.n_cached == 0
    assert engine.prefix_cache.disk.flush(60)  # what was found to be gone is forgotten, too
    engine.prefix_cache.close()
    engine = engine_on(tmp_path, "hybrid")
    assert ask(engine, prompt).done.stats.source == "disk", "it was written again"
    engine.prefix_cache.close()
    shutil.rmtree(tmp_path / "fake")
    engine = engine_on(tmp_path, "hybrid")
    assert ask(engine, prompt).tokens == expected
    engine.prefix_cache.close()


def test_off_reads_nothing_either(tmp_path: Path) -> None:
    prompt = chat((1, 300), (2, 240))
    engine = engine_on(tmp_path, "hybrid")
    ask(engine, prompt)
    engine.prefix_cache.close()
    engine = engine_on(tmp_path, "hybrid")
    assert ask(engine, prompt, disk_policy=DiskPolicy("off")).done.stats.source == "none"
    engine.prefix_cache.close()
    engine = engine_on(tmp_path, "hybrid", "off")
    assert ask(engine, prompt).done.stats.source == "none"
    engine.prefix_cache.close()


def test_the_engine_asks_neither_the_index_nor_a_thread_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index is only touched by other threads, and turns go on while the one that writes is
    stuck.
    """
    engine = engine_on(tmp_path, "hybrid", "auto")
    tier = engine.prefix_cache.disk
    stuck = threading.Event()
    tier.recovery.result(60)
    me = threading.get_ident()
    touched = []

    def guarded(name: str) -> None:
        real = getattr(Index, name)

        @contextmanager
        def entered(index: Index) -> Iterator[object]:
            touched.append(threading.get_ident())
            with real(index) as connection:
                yield connection

        monkeypatch.setattr(Index, name, entered)

    guarded("reading")
    guarded("idle")
    guarded("writing")
    prompts = [chat((1, 300), (seed, 240)) for seed in range(2, 8)]
    for prompt in prompts:
        ask(engine, prompt)
    assert tier.flush(60)
    head = min(tmp_path.rglob("*.rows"), key=lambda path: int(path.name.split("-")[0]))
    engine.prefix_cache.cache.clear()
    ask(engine, chat((99, 300)))
    assert ask(engine, prompts[0]).done.stats.source == "disk"

    def hang() -> None:
        with tier.directory.changing():
            stuck.wait(60)

    tier.queue.run_soon(hang)
    tier._refreshed_at = 0.0
    for prompt in prompts[1:]:
        ask(engine, prompt)
    head.write_bytes(b"")
    engine.prefix_cache.cache.clear()
    ask(engine, chat((98, 300)))
    for prompt in prompts:
        ask(engine, prompt)
    assert tier.view().waiting > 0
    assert not stuck.is_set()
    assert touched
    assert me not in touched
    stuck.set()
    assert tier.flush(60)
    assert tier.view().damaged == 1
    engine.prefix_cache.close()


def test_closing_waits_as_long_as_the_disk_may_take(tmp_path: Path) -> None:
    engine = engine_on(tmp_path, "hybrid")
    engine.prefix_cache.disk.close_seconds = 60.0
    ask(engine, chat((1, 300), (2, 240)))
    assert engine.prefix_cache.disk.flush(60)
    gate = threading.Event()
    engine.prefix_cache.disk.queue.run_soon(lambda: gate.wait(60))
    ask(engine, chat((3, 300), (4, 240)))
    worker = Worker(engine, INFO, times=WorkerTimes(step=0.1))
    threading.Timer(0.6, gate.set).start()
    assert worker.close()
    assert gate.is_set()
    assert len(list(tmp_path.rglob("*.state"))) >= 2


def test_a_disk_that_hangs_holds_up_nobody_for_ever(tmp_path: Path) -> None:
    engine = engine_on(tmp_path, "hybrid")
    engine.prefix_cache.disk.close_seconds = 0.2
    gate = threading.Event()
    engine.prefix_cache.disk.queue.run_soon(lambda: gate.wait(60))
    engine.prefix_cache.close()
    assert not gate.is_set()
    gate.set()


def test_the_last_used_conversations_are_written_when_there_are_too_many(tmp_path: Path) -> None:
    engine = engine_on(tmp_path, "hybrid", "600", n_slots=64)
    prompts = [chat((seed, 300)) for seed in range(12)]
    for prompt in prompts:
        ask(engine, prompt)
    ask(engine, chat((98, 300)))  # which parks the last of them
    gate = threading.Event()
    engine.prefix_cache.disk.queue.run_soon(lambda: gate.wait(60))
    threading.Timer(0.3, gate.set).start()
    engine.prefix_cache.close()
    engine = engine_on(tmp_path, "hybrid", "600")
    assert ask(engine, prompts[11]).done.stats.source == "disk"
    engine.prefix_cache.close()


class SlowDirectory:
    """Writes what the queue of ``engine`` has, once ``go_on`` is set."""

    def __init__(self, engine: Engine) -> None:
        self.queue = engine.prefix_cache.disk.queue
        self.go_on = threading.Event()
        self.begun = threading.Event()
        self._write = self.queue.write_one
        self.queue.write_one = self.write

    def write(self, snapshot: Snapshot, spilled: bool) -> Writing:
        self.begun.set()
        assert self.go_on.wait(60)
        return (yield from self._write(snapshot, spilled))


@pytest.mark.parametrize("ends", ["idle", "closed", "evicted"])
@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_all_that_was_chosen_is_on_disk_once_a_slow_one_has_caught_up(
    tmp_path: Path, kind: str, ends: str
) -> None:
    """Every selected snapshot is on disk once a slow drive has caught up, whether the engine was
    idle, closed, or evicted it from RAM meanwhile.
    """
    engine = engine_on(tmp_path, kind)
    n = 24
    slow = SlowDirectory(engine)
    cache = engine.prefix_cache
    prompts = [chat((seed, 300)) for seed in range(n)]
    for prompt in prompts:
        ask(engine, prompt)
        assert slow.begun.wait(60)
    assert cache.disk.view().waiting == n
    if ends == "evicted":
        assert not cache.disk.policy.spill
        cache.cache.evict_bytes(10**9, math.inf)
        assert not cache.cache.snapshots()
    slow.go_on.set()
    if ends == "closed":
        assert cache.close()
    else:
        flushed(engine)
        slow.queue.close(0)  # killed: nothing more is written
    assert cache.disk.view().given_up == 0
    assert cache.disk.view().waiting == 0
    again = engine_on(tmp_path, kind)
    assert [ask(again, prompt).done.stats.source for prompt in prompts] == ["disk"] * n
    again.prefix_cache.close()


def test_a_slow_disk_does_not_hold_the_memory_of_what_was_evicted(tmp_path: Path) -> None:
    """While the disk hangs, evicted snapshots that wait for it take no more RAM than their limit
    and one snapshot. Otherwise a slow disk would fill the RAM.
    """
    maximum = 8_000
    budget = 15_000
    engine = engine_on(tmp_path, "hybrid")
    engine.prefix_cache.device.copies.limits = DeviceLimits(unwritten_bytes=maximum)
    engine.prefix_cache.cache.budget.limit = budget
    writing = threading.Event()
    go_on = threading.Event()

    def write(snapshot: Snapshot, spilled: bool) -> Writing:
        writing.set()
        assert go_on.wait(60)
        yield from ()
        return 0

    engine.prefix_cache.disk.queue.write_one = write
    backend = engine.backend
    largest = 0
    for seed in range(30):
        assert ask(engine, chat((seed, 300))).error is None
        assert writing.wait(60)
        sizes = (
            s.n_bytes + backend.shape.sizes.rows(0, s.n)
            for s in engine.prefix_cache.cache.snapshots()
        )
        largest = max(largest, *sizes)
        held = backend.block_bytes()
        assert held.used - held.in_flight - engine.prefix_cache.cache.n_bytes <= maximum + largest
    assert engine.prefix_cache.disk.view().waiting > 0, "what there is room for waits on"
    go_on.set()
    engine.prefix_cache.close()
