"""A conversation with more rows than RAM holds is written segment by segment, and restored."""

from __future__ import annotations

import errno
import gc
import itertools
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext as does_not_raise
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import Mock

import numpy as np
import pytest

from pyctl.cache.device_limits import DeviceLimits
from pyctl.cache.snapshot import Block, BlockBytes, State
from pyctl.disk.index import Index
from pyctl.engine.engine import Engine
from pyctl.engine.pool_plan import PoolPlan
from pyctl.engine.worker import Worker
from pyctl.errors import StateError
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.cache.checks import check_invariants
from tests.unit.engine import drive
from tests.unit.engine.drive import Reply, chat, cold, standing, tier_of, watch
from tests.unit.engine.test_spill import engine_on
from tests.unit.server.fake import INFO
from tests.waiting import until

RAM = 24_000
BEHIND = 12_000
PIECE = 3_000
"""Bytes of the cache, of what may wait beside it, and of a segment; a row has 16."""

LONG = chat(*((seed, 300) for seed in range(10)))
"""Twice what RAM has room for."""


LIMITS = DeviceLimits(piece_bytes=PIECE, unwritten_bytes=BEHIND)

POOL = PoolPlan.for_layers(2, 4096, 4, 1000)


MakeEngine: TypeAlias = Callable[..., Engine]


@pytest.fixture(params=[None, POOL], ids=["cells", "pool"])
def engine_of(request: pytest.FixtureRequest) -> MakeEngine:
    """engine_of(directory, policy="full", kind="hybrid", budget=None) -> an engine whose rows are
    in the cells of a context, and in a second run of the test in a pool.
    """

    def make(
        directory: Path, policy: str = "full", kind: str = "hybrid", budget: int | None = None
    ) -> Engine:
        return engine_on(
            directory,
            kind,
            policy,
            ram=RAM,
            n_cells=4096,
            budget=budget,
            pool=request.param,
            limits=LIMITS,
        )

    return make


def ask(engine: Engine, prompt: Prompt, max_tokens: int = 8, **options: Any) -> Reply:
    """The same while the thread that writes stands still: how many segments it asks for depends on
    `idle` alone.
    """
    with standing(tier_of(engine)):
        return drive.ask(engine, prompt, max_tokens, **options)


def idle(engine: Engine, n: int = 10_000) -> int:
    """Let it be idle for ``n`` looks, or until it does nothing; how many there were. Each is as
    late as what the one before had written.
    """
    cache = engine.prefix_cache
    tier = tier_of(engine)
    for looked in range(n):
        tier.flush(60)
        if not tier.awaits_rows and not cache.write_back.copy_next():
            tier.flush(60)
            if not tier.awaits_rows:
                return looked
        cache.write_back.flush_copies()
    tier.flush(60)
    return n


def refuse_the_fourth_part(engine: Engine) -> None:
    """Fill the disk when the fourth part is to be written, and not after that."""
    calls = itertools.count(1)

    def refuse(_: Block) -> None:
        if next(calls) == 4:
            raise OSError(errno.ENOSPC, "full")

    watch(engine, refuse)


class Space:
    """A count of the bytes in RAM that ``engine`` has read from disk, now and at the peak, besides
    the few bytes of a state.
    """

    def __init__(self, engine: Engine) -> None:
        self.now = self.peak = self.total = 0
        tier_of(engine).reader.space = self.take

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
    engine_of: MakeEngine, tmp_path: Path, policy: str, kind: str
) -> None:
    """Also where the policy chose nothing of it, since it would be written in the end."""
    engine = engine_of(tmp_path, policy, kind)
    memory = engine.backend
    cache = engine.prefix_cache.cache
    assert isinstance(memory, FakeBackend)
    beside: list[int] = []

    def measure(rows: Block) -> None:
        beside.append(memory.block_bytes().used - cache.n_bytes)
        assert rows.nbytes <= PIECE

    watch(engine, measure)
    expected = ask(engine, LONG).tokens
    assert expected == cold(FakeBackend(kind), LONG).tokens
    idle(engine)
    assert tier_of(engine).view().waiting == 0
    assert len(beside) > 8
    assert max(beside) <= BEHIND
    check_invariants(cache)
    assert tier_of(engine).flush(60)
    assert tier_of(engine).directory.verify().is_consistent
    restarted = engine_of(tmp_path, policy, kind)
    read = Space(restarted)
    again = ask(restarted, LONG)
    assert again.tokens == expected
    assert read.total > 40_000
    assert read.peak <= BEHIND + PIECE
    assert again.done.stats.source == "disk"
    assert again.done.stats.n_cached == LONG.end
    check_invariants(restarted.prefix_cache.cache)
    for each in (engine, restarted):
        assert each.prefix_cache.close()
    assert not temps(tmp_path)


@pytest.mark.parametrize("was_refused", [False, True])
def test_what_was_not_written_while_idle_is_written_in_the_end(
    engine_of: MakeEngine, tmp_path: Path, was_refused: bool
) -> None:
    """At once after a full disk, which is not the hour to leave it alone for a while."""
    engine = engine_of(tmp_path)
    expected = ask(engine, LONG).tokens
    if was_refused:
        refuse_the_fourth_part(engine)
        idle(engine)
        assert tier_of(engine).view().failed == 1
        assert tier_of(engine).view().written.n == 0
        assert not temps(tmp_path)
    assert tier_of(engine).view().waiting == 1
    assert engine.prefix_cache.close()
    restarted = engine_of(tmp_path)
    again = ask(restarted, LONG)
    assert again.tokens == expected
    assert again.done.stats.source == "disk"
    restarted.prefix_cache.close()


def test_an_idle_engine_is_woken_for_each_part(engine_of: MakeEngine, tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    ask(engine, LONG)
    worker = Worker(engine, INFO)
    until(lambda: tier_of(engine).view().written.n == 1)
    assert LONG.end in tier_of(engine).folder.lengths
    assert worker.close()


def test_if_there_is_no_time_the_end_says_so_and_leaves_nothing(
    engine_of: MakeEngine, tmp_path: Path
) -> None:
    engine = engine_of(tmp_path)
    ask(engine, LONG)
    tier_of(engine).close_seconds = 1.0  # all of which is kept for the rest
    assert not engine.prefix_cache.close()
    assert not temps(tmp_path)
    assert not list(tmp_path.rglob("*.rows"))


def test_the_next_turn_writes_only_what_is_new(engine_of: MakeEngine, tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    ask(engine, LONG)
    idle(engine)
    assert tier_of(engine).flush(60)
    before = tier_of(engine).view().written.n_bytes
    engine.backend.fetch = fetched = Mock(wraps=engine.backend.fetch)
    longer = chat(*((seed, 300) for seed in range(10)), (77, 60))
    assert ask(engine, longer).done.stats.n_cached >= LONG.end
    idle(engine)
    assert tier_of(engine).flush(60)
    assert 0 < tier_of(engine).view().written.n_bytes - before < 4_000
    assert (
        sum(last - first for _, first, last in (each.args for each in fetched.call_args_list)) < 400
    )
    engine.prefix_cache.close()


@pytest.mark.parametrize("room", [4 * RAM, PIECE])
def test_requests_between_two_parts_copy_or_end_the_prewarm(
    engine_of: MakeEngine, tmp_path: Path, room: int
) -> None:
    """A request that takes the cells of a write in parts copies the remaining rows to RAM, or ends
    the write if there is no room. Replies, files and the daily count of written bytes stay right.
    """
    engine = engine_of(tmp_path)
    ask(engine, LONG)
    for looks in range(1, 4):
        idle(engine, 2)
        other = chat((50 + looks, 120))
        assert ask(engine, other).tokens == cold(FakeBackend(), other).tokens
    assert temps(tmp_path), "none of these took so many cells"
    copies = engine.prefix_cache.device.copies
    copies.limits = DeviceLimits(PIECE, unwritten_bytes=room, unwritten_part=RAM)
    large = chat(*((seed, 300) for seed in range(90, 102)))
    assert ask(engine, large).tokens == cold(FakeBackend(), large).tokens
    copies.limits = DeviceLimits(PIECE, unwritten_bytes=BEHIND, unwritten_part=RAM)
    idle(engine)
    assert tier_of(engine).view().waiting == 0
    directory = tier_of(engine).directory
    n_bytes = (
        directory.n_bytes
    )  # not inside: the thread that writes may hold its lock, and wait for the connection
    with directory.reading() as connection:
        assert (Index.written_today(connection) > n_bytes) == (room == PIECE), (
            "what was given up counts, too"
        )
    is_written = room > PIECE
    assert (LONG.end in tier_of(engine).folder.lengths) == is_written
    assert (tier_of(engine).view().given_up > 0) == (not is_written)
    assert tier_of(engine).contains(engine.prefix_cache.cache.conversation_ends()[0].prefix)
    assert directory.verify().is_consistent
    engine.prefix_cache.close()
    assert not temps(tmp_path)


def test_a_small_budget_ends_it(engine_of: MakeEngine, tmp_path: Path) -> None:
    engine = engine_of(tmp_path, budget=20_000)
    ask(engine, LONG)
    assert idle(engine) < 10_000
    assert tier_of(engine).view().given_up == 1
    assert engine.prefix_cache.close(), "that would not help"
    assert not list(tmp_path.rglob("*.rows"))


def test_nothing_of_a_part_that_the_disk_refused_stays_in_ram(
    engine_of: MakeEngine, tmp_path: Path
) -> None:
    """A part that the disk refused is freed at once, not when the collector comes."""
    engine = engine_of(tmp_path)
    parts: list[weakref.ref[Block]] = []

    def refuse(rows: Block) -> None:
        parts.append(weakref.ref(rows))
        raise OSError(errno.ENOSPC, "full")

    watch(engine, refuse)
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


def test_rows_that_wait_leave_room_for_states(
    engine_of: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are copied to RAM only as far as the state of the next snapshot still fits: exactly up
    to the limit, and not one byte above.
    """
    engine = engine_of(tmp_path)
    ask(engine, LONG)
    backend = engine.backend
    cache = engine.prefix_cache.cache
    device = engine.prefix_cache.device
    segment = next(each for each in cache.segments() if each.device_only_bytes)
    for state_bytes, spare in ((100, 400), (2_000, BEHIND // 4)):
        monkeypatch.setattr(
            backend, "state_size", lambda seq, ends=(), n=state_bytes: max(len(ends), 1) * n
        )
        room = BEHIND - segment.device_only_bytes - spare
        for beside, more in ((room, does_not_raise()), (room + 1, pytest.raises(MemoryError))):
            monkeypatch.setattr(
                backend, "block_bytes", lambda n=beside: BlockBytes(cache.n_bytes + n, 0, 0)
            )
            with more:
                device.copies.fetch_rows([segment])
    monkeypatch.undo()
    engine.prefix_cache.close()


def test_what_is_removed_meanwhile_is_not_published(engine_of: MakeEngine, tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    ask(engine, LONG)
    idle(engine, 4)
    (end,) = engine.prefix_cache.cache.conversation_ends()[:1]
    assert tier_of(engine).remove(end.prefix.name)
    idle(engine)
    assert not tier_of(engine).contains(end.prefix)
    engine.prefix_cache.cache.clear()
    engine.prefix_cache.close()
    assert not temps(tmp_path)


def test_little_is_read_of_what_the_live_sequence_has(
    engine_of: MakeEngine, tmp_path: Path
) -> None:
    """A restore from disk reads the segments after the common prefix with the live sequence, and of
    the others only the ones whose reads start at once. RAM never holds more than may wait and one
    segment.
    """
    engine = engine_of(tmp_path)
    expected = ask(engine, LONG).tokens
    assert engine.prefix_cache.close()
    engine = engine_of(tmp_path)
    ask(engine, chat(*((seed, 300) for seed in range(6)), (99, 40)), cache_prompt=False)
    read = Space(engine)
    again = ask(engine, LONG)
    assert again.tokens == expected
    assert again.done.stats.source == "disk"
    assert 16 * 1_200 < read.total < 16 * 2_400, (
        "what began to be read at once, and what the sequence had not got"
    )
    assert read.peak <= BEHIND + PIECE
    check_invariants(engine.prefix_cache.cache)
    engine.prefix_cache.close()


@pytest.mark.parametrize("how", ["cancelled", "damaged", "refused"])
def test_a_large_restore_that_fails_leaves_no_cells_held(
    engine_of: MakeEngine, tmp_path: Path, how: str
) -> None:
    """A restore in parts that is cancelled, damaged or refused gives back all cells, and the next
    request has the right reply.
    """
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
        real = backend.load_state

        def load_state(seq: int, n: int, state: State) -> None:
            backend.load_state = real
            raise StateError("not this one")

        backend.load_state = load_state
    if how != "cancelled":
        assert ask(engine, LONG).tokens == expected
    check_invariants(engine.prefix_cache.cache)
    engine.prefix_cache.cache.clear()
    assert backend.n_held_cells == 0
    assert ask(engine, LONG).tokens == expected
    engine.prefix_cache.close()


def test_a_large_restore_for_which_memory_ends_is_a_miss(
    engine_of: MakeEngine, tmp_path: Path
) -> None:
    """An allocation that fails in the middle of a restore costs a cold prefill. It is not counted
    as a damaged file, and no cell stays held.
    """
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

    tier_of(engine).reader.space = take
    again = ask(engine, LONG)
    assert again.error is None
    assert again.tokens == expected
    assert again.done.stats.n_cached == 0
    assert len(calls) == 12
    assert tier_of(engine).reader.n_damaged == 0
    check_invariants(engine.prefix_cache.cache)
    engine.prefix_cache.cache.clear()
    assert engine.backend.n_held_cells == 0
    engine.prefix_cache.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_order_with_more_than_ram_has_room_for(
    engine_of: MakeEngine, tmp_path: Path, seed: int
) -> None:
    """Conversations larger than RAM, in random order with pauses and restarts, have the replies of
    a cold run, stay within the disk budget and leave no temporary file.
    """
    choice = random.Random(seed)
    talks = [[(10 * who + i, 300) for i in range(choice.randrange(3, 9))] for who in range(3)]
    budget = 150_000
    from_disk = 0
    for _ in range(3):
        engine = engine_of(tmp_path, choice.choice(["full", "auto,spill"]), budget=budget)
        tier_of(engine).recovery.result(60)
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
