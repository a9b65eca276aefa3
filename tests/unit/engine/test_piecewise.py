"""A conversation with more rows than RAM holds is written segment by segment, and restored."""

from __future__ import annotations

import errno
import gc
import os
import random
import sys
import threading
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pyctl.cache import PrefixCache, device_tier
from pyctl.cache.disk.index import Index
from pyctl.cache.disk.writer import OpenWrite, StoreWriter
from pyctl.cache.disk_tier import DiskTier
from pyctl.cache.snapshot import Block, BlockBytes, Held, Segment, State
from pyctl.engine.engine import Engine
from pyctl.engine.pool import PoolPlan
from pyctl.errors import StateError
from tests.fake import FakeBackend
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ask, chat, cold
from tests.unit.engine.test_spill import engine_on, tier_of

RAM, BEHIND, PIECE = 24_000, 12_000, 3_000
"""Bytes of the cache, of what may wait beside it, and of a segment; a row has 16."""

LONG = chat(*((seed, 300) for seed in range(10)))
"""Twice what RAM has room for."""


POOL = PoolPlan.of(2, 4096, 4, 1000)


@pytest.fixture(autouse=True, params=[None, POOL], ids=["cells", "pool"])
def small(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Each test with rows in cells of a context, and with those of a pool. `idle` and closing alone copy segments: how
    many steps find waiting depends on the thread that writes."""
    real = PrefixCache.hand_over
    monkeypatch.setattr(sys.modules[__name__], "POOL", request.param)
    monkeypatch.setattr(PrefixCache, "hand_over", lambda self: real(self) if is_closing(self.disk) else None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(device_tier, "MOST_BEHIND_BYTES", BEHIND)
    monkeypatch.setattr(device_tier, "PIECE_BYTES", PIECE)


def engine_of(directory: Path, policy: str = "full", kind: str = "hybrid", budget: int | None = None) -> Engine:
    return engine_on(directory, kind, policy, ram=RAM, n_cells=4096, budget=budget, pool=POOL)


def is_closing(tier: DiskTier | None) -> bool:
    return tier is not None and tier.queue._last_chance


def is_asking(tier: DiskTier) -> bool:
    """Whether the thread that writes waits for rows."""
    piece = tier.queue._piece
    return piece is not None and piece.rows is None and piece.error is None


def idle(engine: Engine, n: int = 10_000) -> int:
    """Let it be idle for ``n`` looks, or until it does nothing any more; how many there were. Each is as late as what
    the one before had written."""
    device, tier = engine.prefix_cache.device, tier_of(engine)
    queue = tier.queue
    for looked in range(n):
        seconds = queue.write_piece(device.piece_of)
        if not device.copy_next(tier) and seconds is None:
            return looked
        with queue._changed:  # a job that the thread has not begun yet counts as busy
            queue._changed.wait_for(lambda: is_asking(tier) or not (queue._n_busy or queue._may_write()), 60)
    return n


def refuse_the_fourth_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the fourth part is to be written, and not after that."""
    real, calls = StoreWriter.add, []

    def add(files: StoreWriter, writing: OpenWrite, segment: Segment, rows: Block) -> None:
        calls.append(segment.end)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, "full")
        real(files, writing, segment, rows)

    monkeypatch.setattr(StoreWriter, "add", add)


def waits(event: threading.Event) -> None:
    assert event.wait(60)


class Space:
    """How much of what is read from disk by ``engine`` is in RAM, besides the few bytes of a state, and was."""

    def __init__(self, engine: Engine) -> None:
        self.now = self.peak = self.total = 0
        tier_of(engine).store._space = self.take

    def take(self, n_bytes: int) -> Block:
        block = np.empty(n_bytes, np.uint8)
        if n_bytes > 100:
            self.now += n_bytes
            self.total += n_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(block, self.free, n_bytes)
        return block

    def free(self, n_bytes: int) -> None:
        self.now -= n_bytes


def temps(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*.tmp") if path.exists()]


@pytest.mark.parametrize("kind", ["hybrid", "attention"])
@pytest.mark.parametrize("policy", ["full", "auto,spill"])
def test_it_survives_a_restart_and_no_more_than_a_part_is_in_ram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, kind: str
) -> None:
    """Also where the policy chose nothing of it, since it would be written in the end."""
    engine = engine_of(tmp_path, policy, kind)
    memory, cache = engine.backend, engine.prefix_cache.cache
    assert isinstance(memory, FakeBackend)
    beside: list[int] = []
    real = StoreWriter.add

    def add(files: StoreWriter, writing: OpenWrite, segment: Segment, rows: Block) -> None:
        beside.append(memory.block_bytes().used - cache.n_bytes)
        assert rows.nbytes <= PIECE
        real(files, writing, segment, rows)

    monkeypatch.setattr(StoreWriter, "add", add)
    expected = ask(engine, LONG).tokens
    assert expected == cold(FakeBackend(kind), LONG).tokens
    idle(engine)
    assert tier_of(engine).view().waiting == 0
    assert len(beside) > 8
    assert max(beside) <= BEHIND
    check_invariants(cache)
    assert tier_of(engine).flush(60)
    assert tier_of(engine).store.directory.verify().sound
    restarted = engine_of(tmp_path, policy, kind)
    read = Space(restarted)
    again = ask(restarted, LONG)
    assert again.tokens == expected
    assert read.total > 40_000
    assert read.peak <= BEHIND + PIECE
    assert (again.done.stats.source, again.done.stats.n_cached) == ("disk", LONG.end)
    check_invariants(restarted.prefix_cache.cache)
    for each in (engine, restarted):
        assert each.prefix_cache.close()
    assert not temps(tmp_path)


def test_what_was_not_written_while_idle_is_written_in_the_end(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    expected = ask(engine, LONG).tokens
    assert tier_of(engine).view().waiting == 1
    assert engine.prefix_cache.close()
    restarted = engine_of(tmp_path)
    again = ask(restarted, LONG)
    assert again.tokens == expected
    assert again.done.stats.source == "disk"
    restarted.prefix_cache.close()


def test_if_there_is_no_time_the_end_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    ask(engine, LONG)
    tier_of(engine).close_seconds = 1.0  # all of which is kept for the rest
    assert not engine.prefix_cache.close()
    assert not temps(tmp_path)
    assert not list(tmp_path.rglob("*.rows"))


def test_the_next_turn_writes_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tmp_path)
    ask(engine, LONG)
    idle(engine)
    assert tier_of(engine).flush(60)
    before, fetched = tier_of(engine).view().written.n_bytes, []
    fetch = engine.backend.fetch

    def count(held: Held, first: int, last: int) -> Block:
        fetched.append(last - first)
        return fetch(held, first, last)

    monkeypatch.setattr(engine.backend, "fetch", count)
    longer = chat(*((seed, 300) for seed in range(10)), (77, 60))
    assert ask(engine, longer).done.stats.n_cached >= LONG.end
    idle(engine)
    assert tier_of(engine).flush(60)
    assert 0 < tier_of(engine).view().written.n_bytes - before < 4_000
    assert sum(fetched) < 400
    engine.prefix_cache.close()


def test_others_come_between_two_parts_and_who_takes_its_cells_ends_it(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    ask(engine, LONG)
    for looks in range(1, 6):
        idle(engine, 2)
        other = chat((50 + looks, 120))
        assert ask(engine, other).tokens == cold(FakeBackend(), other).tokens
    assert tier_of(engine).queue._n_large == 1, "none of these took so many cells"
    assert temps(tmp_path)
    large = chat(*((seed, 300) for seed in range(90, 102)))
    assert ask(engine, large).tokens == cold(FakeBackend(), large).tokens
    idle(engine)
    assert tier_of(engine).flush(60)
    assert tier_of(engine).view().waiting == 0
    assert tier_of(engine).view().given_up == 1
    directory = tier_of(engine).store.directory
    n_bytes = directory.n_bytes  # not inside: the thread that writes may hold its lock, and wait for the connection
    with directory.reading() as connection:
        assert Index.written_today(connection) > n_bytes, "what was given up counts, too"
    assert tier_of(engine).store.contains(engine.prefix_cache.cache.conversation_ends()[0].prefix)
    assert tier_of(engine).store.directory.verify().sound
    engine.prefix_cache.close()
    assert not temps(tmp_path)


def test_a_full_disk_or_a_small_budget_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tmp_path / "small", budget=20_000)
    ask(engine, LONG)
    assert idle(engine) < 10_000
    assert tier_of(engine).view().given_up == 1
    assert engine.prefix_cache.close(), "that would not help"
    assert not list(tmp_path.rglob("*.rows"))
    engine = engine_of(tmp_path / "full")
    refuse_the_fourth_part(monkeypatch)
    ask(engine, LONG)
    idle(engine)
    view = tier_of(engine).view()
    assert (view.failed, view.written.n) == (1, 0)
    tier_of(engine).queue.retry()
    tier_of(engine).flush(60)
    assert not temps(tmp_path)
    assert ask(engine, LONG).error is None
    engine.prefix_cache.close()


def test_nothing_of_a_part_that_the_disk_refused_stays_in_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even until the collector comes."""
    engine = engine_of(tmp_path)
    parts: list[weakref.ref[Block]] = []

    def add(files: StoreWriter, writing: OpenWrite, segment: Segment, rows: Block) -> None:
        parts.append(weakref.ref(rows))
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(StoreWriter, "add", add)
    ask(engine, LONG)
    gc.disable()
    try:
        idle(engine)
        tier_of(engine).queue.retry()
        assert tier_of(engine).flush(60), "the thread that writes waits again"
        counted = [id(segment.rows) for segment in engine.prefix_cache.cache.segments()]
        assert len(parts) == 1
        assert all(part() is None or id(part()) in counted for part in parts)
    finally:
        gc.enable()
    engine.prefix_cache.close()


def test_after_a_full_disk_the_end_tries_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And at once, which is not the hour to leave the disk alone for a while."""
    engine = engine_of(tmp_path)
    refuse_the_fourth_part(monkeypatch)
    ask(engine, LONG)
    idle(engine)
    assert tier_of(engine).view().given_up == 1
    assert engine.prefix_cache.close()
    assert LONG.end in tier_of(engine).store.lengths()


def test_what_does_not_fit_beside_others_that_wait_goes_a_part_at_a_time(tmp_path: Path) -> None:
    engine = engine_on(tmp_path, "hybrid", "auto", ram=RAM, n_cells=8192)
    for prompt in (LONG, *(chat((seed, 480)) for seed in range(20, 26))):
        ask(engine, prompt)  # the first one fills RAM
    device, tier, ends = engine.prefix_cache.device, tier_of(engine), engine.prefix_cache.cache.conversation_ends()[:6]
    assert tier.flush(60)
    assert all(device.may_copy(end) for end in ends), "each alone"
    is_over = threading.Event()
    tier.queue.run_soon(partial(waits, is_over))
    engine.prefix_cache.settle(ends)
    assert not all(device.may_copy(end) for end in ends), "copies of others wait for the disk"
    assert tier.view().waiting == len(ends) == 6
    is_over.set()
    idle(engine)
    assert tier.flush(60)
    assert all(tier.store.contains(end.prefix) for end in ends)
    engine.prefix_cache.close()


def test_rows_that_wait_leave_room_for_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tmp_path)
    ask(engine, LONG)
    backend, cache, device = engine.backend, engine.prefix_cache.cache, engine.prefix_cache.device
    segment = next(each for each in cache.segments() if each.only_held_bytes)
    for state_bytes, spare in ((100, 400), (2_000, BEHIND // 4)):
        monkeypatch.setattr(backend, "state_size", lambda seq, ends=(), n=state_bytes: max(len(ends), 1) * n)
        room = BEHIND - segment.only_held_bytes - spare
        for beside, has_room in ((room, True), (room + 1, False)):
            monkeypatch.setattr(backend, "block_bytes", lambda n=beside: BlockBytes(cache.n_bytes + n, 0, 0))
            assert (device.piece_of(segment) is not None) == has_room
    monkeypatch.undo()
    engine.prefix_cache.close()


def test_what_is_removed_meanwhile_is_not_published(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    ask(engine, LONG)
    idle(engine, 4)
    (end,) = engine.prefix_cache.cache.conversation_ends()[:1]
    assert tier_of(engine).remove(end.prefix.name)
    idle(engine)
    assert not tier_of(engine).store.contains(end.prefix)
    engine.prefix_cache.cache.clear()
    engine.prefix_cache.close()
    assert not temps(tmp_path)


def test_little_is_read_of_what_the_live_sequence_has(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    expected = ask(engine, LONG).tokens
    assert engine.prefix_cache.close()
    engine = engine_of(tmp_path)
    ask(engine, chat(*((seed, 300) for seed in range(6)), (99, 40)), cache_prompt=False)
    read = Space(engine)
    again = ask(engine, LONG)
    assert (again.tokens, again.done.stats.source) == (expected, "disk")
    assert 16 * 1_200 < read.total < 16 * 2_400, "what began to be read at once, and what the sequence had not got"
    assert read.peak <= BEHIND + PIECE
    check_invariants(engine.prefix_cache.cache)
    engine.prefix_cache.close()


@pytest.mark.parametrize("how", ["cancelled", "damaged", "refused"])
def test_a_large_restore_that_fails_leaves_no_cells_held(tmp_path: Path, how: str) -> None:
    engine = engine_of(tmp_path)
    expected = ask(engine, LONG).tokens
    assert engine.prefix_cache.close()
    if how == "damaged":
        path = sorted(tmp_path.rglob("*.rows"), key=lambda path: int(path.name.split("-")[0]))[-2]
        path.write_bytes(path.read_bytes()[:-1] + b"\0\1")
    engine = engine_of(tmp_path)
    backend = engine.backend
    if how == "cancelled":
        ask(engine, LONG, cancel_after=2)
    elif how == "refused":
        real = backend._load_state

        def load_state(seq: int, n: int, state: State) -> None:
            backend._load_state = real
            raise StateError("not this one")

        backend._load_state = load_state
    if how != "cancelled":
        assert ask(engine, LONG).tokens == expected
    check_invariants(engine.prefix_cache.cache)
    engine.prefix_cache.cache.clear()
    assert backend.n_held == 0
    assert ask(engine, LONG).tokens == expected
    engine.prefix_cache.close()


def test_a_large_restore_for_which_memory_ends_is_a_miss(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    expected = ask(engine, LONG).tokens
    assert engine.prefix_cache.close()
    engine = engine_of(tmp_path)
    calls: list[int] = []

    def take(n_bytes: int) -> Block:
        calls.append(n_bytes)
        if len(calls) == 12:  # of what is read when the device has the first
            raise MemoryError
        return np.empty(n_bytes, np.uint8)

    tier_of(engine).store._space = take
    again = ask(engine, LONG)
    assert again.error is None
    assert (again.tokens, again.done.stats.n_cached) == (expected, 0)
    assert len(calls) == 12
    assert tier_of(engine).store.damaged == 0
    check_invariants(engine.prefix_cache.cache)
    engine.prefix_cache.cache.clear()
    assert engine.backend.n_held == 0
    engine.prefix_cache.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_order_with_more_than_ram_has_room_for(tmp_path: Path, seed: int) -> None:
    choice = random.Random(seed)
    talks = [[(10 * who + i, 300) for i in range(choice.randrange(3, 9))] for who in range(3)]
    budget, from_disk = 150_000, 0
    for _ in range(3):
        engine = engine_of(tmp_path, choice.choice(["full", "auto,spill"]), budget=budget)
        tier_of(engine)._recovery.result(60)
        for _ in range(6):
            talk = choice.choice(talks)
            if len(talk) > 9:
                del talk[choice.randint(2, 8) :]
            talk.append((choice.randrange(1000), choice.choice([40, 170])))
            prompt = chat(*talk)
            reply = ask(engine, prompt, 4)
            assert reply.tokens == cold(FakeBackend(), prompt, 4).tokens
            from_disk += reply.done.stats.source == "disk"
            check_invariants(engine.prefix_cache.cache)
            idle(engine, choice.choice([0, 2, 7, 10_000]))
        engine.prefix_cache.close()
        assert not temps(tmp_path)
        assert sum(path.stat().st_size for path in tmp_path.rglob("fake/*.*")) <= budget
    assert from_disk
