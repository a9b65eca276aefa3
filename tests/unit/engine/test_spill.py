"""Snapshots that RAM evicts are spilled and restored, despite faults of the disk; prompts resume
the quickest way.
"""

from __future__ import annotations

import errno
import random
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from pyctl.cache.costs import Costs
from pyctl.cache.device_limits import DeviceLimits
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Block, HeldRows
from pyctl.disk.write_queue import RETRY_SECONDS
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.pool_plan import PoolPlan
from pyctl.errors import StateError
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ask, cold, flushed, request, standing, tier_of, tier_on, watch
from tests.unit.engine.messages import KINDS, chat


class Steady(Costs):
    """The costs of a large model on a good drive, whatever the fake one takes."""

    def record_evaluated(self, first: int, last: int, seconds: float) -> None:
        pass

    def record_read(self, n_bytes: int, seconds: float) -> None:
        pass


def engine_on(
    directory: Path,
    kind: str = "hybrid",
    policy: str = "spill",
    *,
    ram: int | None = 30_000,
    budget: int | None = None,
    daily: int | None = None,
    costs: Costs | None = None,
    n_cells: int = 0,
    pool: PoolPlan | None = None,
    limits: DeviceLimits = DeviceLimits(),
    retry_seconds: float = RETRY_SECONDS,
) -> Engine:
    """Rows are held on the device if it has ``n_cells``, or in a ``pool``."""
    chosen = DiskPolicy.from_flag(policy)
    tier = tier_on(
        directory, policy=chosen, budget=budget, daily_bytes=daily, retry_seconds=retry_seconds
    )
    backend = FakeBackend(kind, n_ctx=n_cells or 4096, can_hold=n_cells > 0, pool=pool)
    settings = EngineSettings(exact=True, device=limits)
    return Engine(backend, RamCache(64, ram, costs or Steady()), settings, tier)


CONVERSATIONS = [chat((seed, 300), (seed + 50, 240)) for seed in range(1, 9)]


@pytest.mark.parametrize("n_cells", [0, 1200])
@pytest.mark.parametrize("kind", KINDS)
def test_what_left_ram_comes_back_from_disk_also_after_a_restart(
    tmp_path: Path, kind: str, n_cells: int
) -> None:
    """Conversations that RAM evicts are written to disk and resumed from there with equal replies,
    in the same process and after a restart.
    """
    engine = engine_on(tmp_path, kind, n_cells=n_cells)
    expected = [ask(engine, prompt).tokens for prompt in CONVERSATIONS]
    assert engine.prefix_cache.cache.evictor.n_evicted > 0
    view = flushed(engine).view()
    assert view.spilled.n > 0
    assert view.spilled == view.written
    gone = [
        n
        for n, prompt in enumerate(CONVERSATIONS)
        if ask_source(engine, prompt, expected[n]) == "disk"
    ]
    assert gone, "nothing came back from disk"
    check_invariants(engine.prefix_cache.cache)
    tier_of(engine).close()
    again = engine_on(tmp_path, kind)
    assert any(ask_source(again, CONVERSATIONS[n], expected[n]) == "disk" for n in gone)
    again.prefix_cache.close()


def ask_source(engine: Engine, prompt: Prompt, expected: list[int]) -> str:
    reply = ask(engine, prompt)
    assert reply.tokens == expected
    assert reply.done is not None
    return reply.done.stats.source


@pytest.mark.parametrize(("policy", "read_seconds"), [("auto", 0.0), ("spill", 1e12)])
def test_no_spill_without_the_flag_or_if_reading_costs_more(
    tmp_path: Path, policy: str, read_seconds: float
) -> None:
    costs = Steady()
    costs.read = lambda n_bytes: read_seconds  # type: ignore[method-assign]
    engine = engine_on(tmp_path, policy=policy, costs=costs)
    for prompt in CONVERSATIONS:
        ask(engine, prompt)
    assert engine.prefix_cache.cache.evictor.n_evicted > 0
    assert flushed(engine).view().spilled.n == 0
    engine.prefix_cache.close()


def test_a_request_that_wants_nothing_on_disk_leaves_nothing_there(tmp_path: Path) -> None:
    """Neither when it leaves RAM nor when the server ends."""
    engine = engine_on(tmp_path)
    for prompt in CONVERSATIONS:
        ask(engine, prompt, disk_policy=DiskPolicy("off"))
    assert engine.prefix_cache.cache.evictor.n_evicted > 0
    ask(engine, chat((99, 300), (98, 200)), disk_policy=DiskPolicy("off"))
    assert flushed(engine).folder.lengths == set()
    engine.prefix_cache.close()
    assert not list(tmp_path.rglob("*.state"))
    assert not list(tmp_path.rglob("*.rows"))


def test_what_another_request_wants_on_disk_goes_there(tmp_path: Path) -> None:
    engine = engine_on(tmp_path, ram=None)
    ask(engine, CONVERSATIONS[0], disk_policy=DiskPolicy("off"))
    ask(engine, CONVERSATIONS[0])
    ask(engine, CONVERSATIONS[1], disk_policy=DiskPolicy("off"))
    engine.prefix_cache.close()
    engine = engine_on(tmp_path)
    assert ask(engine, CONVERSATIONS[1]).done.stats.source == "none"
    assert ask(engine, CONVERSATIONS[0]).done.stats.source == "disk"
    engine.prefix_cache.close()


@pytest.mark.parametrize(("seconds", "source"), [(0.01, "disk"), (0.1, "disk"), (5.0, "live")])
def test_a_prompt_resumes_from_where_it_is_ready_first(
    tmp_path: Path, seconds: float, source: str
) -> None:
    """At 1 ms a token: 240 more of them from disk, against those in memory."""
    prompt = CONVERSATIONS[0]
    engine = engine_on(tmp_path, policy="full", ram=None)
    expected = ask(engine, prompt).tokens
    engine.prefix_cache.close()
    costs = Steady()
    engine = engine_on(tmp_path, policy="full", ram=None, costs=costs)
    ask(engine, chat((1, 300)), disk_policy=DiskPolicy("off"))
    costs.read = lambda n_bytes: seconds  # type: ignore[method-assign]
    stats = ask(engine, prompt).done.stats
    assert stats.source in (source, "ram" if source == "live" else source)
    assert stats.n_cached == (540 if source == "disk" else 300)
    assert ask(engine, prompt).tokens == expected
    engine.prefix_cache.close()


@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_of_a_snapshot_whose_rows_are_in_memory_only_the_state_is_read(
    tmp_path: Path, kind: str
) -> None:
    """A prompt whose rows are in RAM, as part of a longer one's, reads only its state from disk,
    and nothing if the memory has no states.
    """
    inner = chat((1, 300), (2, 240))
    prompt = chat((1, 300), (2, 240), (3, 100), (4, 40))
    engine = engine_on(tmp_path, kind, policy="full", ram=None)
    expected = ask(engine, prompt).tokens, ask(engine, inner).tokens
    engine.prefix_cache.close()
    engine = engine_on(tmp_path, kind, policy="full", ram=None)
    assert ask(engine, prompt, disk_policy=DiskPolicy("off")).tokens == expected[0]
    cache = engine.prefix_cache.cache
    read = []
    for snapshot in cache.snapshots():
        if snapshot.n < prompt.end:
            cache.drop(snapshot)
    ask(engine, chat((77, 300)), disk_policy=DiskPolicy("off"))
    tier_of(engine).reader.record_read = lambda n_bytes, seconds: read.append(n_bytes)
    reply = ask(engine, inner)
    assert reply.tokens == expected[1]
    if kind == "hybrid":  # rows alone suffice where there is no state
        assert reply.done.stats.source == "disk"
        assert reply.done.stats.n_cached == 540
        assert read == [engine.backend.state_size(0)]
    check_invariants(cache)
    engine.prefix_cache.close()


class RefusingDrive:
    """Refuses a ``share`` of what is to be written."""

    def __init__(self, choice: random.Random) -> None:
        self.choice = choice
        self.share = 0.0

    def refuse(self, rows: Block) -> None:
        if self.choice.random() < self.share:
            raise OSError(errno.ENOSPC, "full")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_any_order_on_any_disk_gives_right_replies_within_all_budgets(
    tmp_path: Path, kind: str, seed: int
) -> None:
    """Random conversations, restarts, refusals of the disk and deleted files change no reply. The
    budgets of the disk and of the day hold throughout, and the files that remain are consistent.
    """
    choice = random.Random(f"{kind}{seed}")
    budget = choice.choice([20_000, 60_000])
    daily = choice.choice([None, 100_000])
    drive = RefusingDrive(random.Random(seed))  # of its own: another thread asks it
    expected: dict[bytes, list[int]] = {}
    conversations = [[(number % 3, 300)] for number in range(5)]
    written = 0
    for _ in range(4):
        policy = choice.choice(["spill", "auto,spill", "full,spill"])
        ram = choice.choice([15_000, 40_000])
        n_cells = choice.choice([0, 1600, 4096])
        engine = engine_on(
            tmp_path,
            kind,
            policy,
            ram=ram,
            budget=budget,
            daily=daily,
            n_cells=n_cells,
            retry_seconds=0.02,
        )
        tier = tier_of(engine)
        watch(engine, drive.refuse)
        tier.recovery.result(60)
        for _ in range(8):
            drive.share = choice.choice([0.0, 0.0, 0.5, 1.0])
            talk = choice.choice(conversations)
            if len(talk) > 5:
                del talk[choice.randint(1, 5) :]
            talk.append((choice.randrange(1000), choice.choice([40, 100, 170])))
            prompt = chat(*talk)
            key = prompt.tokens.tobytes()
            if key not in expected:
                expected[key] = cold(FakeBackend(kind), prompt, 4).tokens
            if choice.random() < 0.3:
                with standing(tier):
                    reply = ask(engine, prompt, 4)
            else:
                reply = ask(engine, prompt, 4)
            assert reply.error is None
            assert reply.tokens == expected[key]
            check_invariants(engine.prefix_cache.cache)
            if choice.random() < 0.2:
                for path in [*sorted(tmp_path.rglob("*.rows")), *sorted(tmp_path.rglob("*.state"))][
                    :1
                ]:
                    path.unlink(missing_ok=True)  # the thread that writes may have been first
            assert tier.directory.n_bytes <= budget
        drive.share = 0.0
        engine.prefix_cache.close()
        assert tier.view().waiting == 0
        written += tier.view().written.n_bytes
        assert sum(path.stat().st_size for path in tmp_path.rglob("fake/*.*")) <= budget
    assert daily is None or written <= daily
    fresh = engine_on(tmp_path, kind, "full", budget=budget)
    report = tier_of(fresh).directory.verify(fix=True)
    assert all(np.isfinite(entry.used) for entry in tier_of(fresh).directory.entries())
    assert report.n_bytes <= budget
    fresh.prefix_cache.close()


@pytest.mark.parametrize("fails", [False, True])
def test_rows_that_only_the_device_has_are_fetched_before_they_go(
    tmp_path: Path, fails: bool
) -> None:
    """A failed fetch is logged and changes no reply."""
    engine = engine_on(tmp_path, ram=1_500, n_cells=1_200)
    engine.backend.fetch = Mock(  # type: ignore[method-assign]
        wraps=engine.backend.fetch, side_effect=StateError("the device is away") if fails else None
    )
    expected = [ask(engine, prompt).tokens for prompt in CONVERSATIONS]
    view = flushed(engine).view()
    assert engine.backend.fetch.called
    assert (view.spilled.n > 0) is not fails
    sources = [
        ask_source(engine, prompt, tokens)
        for prompt, tokens in zip(CONVERSATIONS, expected, strict=True)
    ]
    assert ("disk" in sources) is not fails
    check_invariants(engine.prefix_cache.cache)
    assert flushed(engine).directory.verify().is_consistent
    engine.prefix_cache.close()


def test_no_step_copies_more_than_a_segment_for_the_disk(tmp_path: Path) -> None:
    """Once its prompt is evaluated, also where there is room beside the cache for all."""
    limits = DeviceLimits(piece_bytes=3_000)
    engine = engine_on(tmp_path, policy="full", ram=24_000, n_cells=8192, limits=limits)
    fetched: list[int] = []
    fetch = engine.backend.fetch
    handle = RequestHandle(request(chat(*((seed, 300) for seed in range(10))), 40))

    def count(held: HeldRows, first: int, last: int) -> Block:
        block = fetch(held, first, last)
        fetched.append(block.nbytes)
        return block

    engine.submit(handle)
    while not engine.running or engine.running[0].pending is None:
        engine.step()
    engine.backend.fetch = count
    for _ in range(30):
        assert tier_of(engine).flush(60)
        before = len(fetched)
        engine.step()
        assert sum(fetched[before:]) <= 3_000
    assert fetched
    assert engine.prefix_cache.close()
    assert tier_of(engine).view().written.n_bytes > 30_000


def test_evicted_snapshots_are_written_while_reply_has_no_step(tmp_path: Path) -> None:
    engine = engine_on(tmp_path)
    for prompt in CONVERSATIONS:
        ask(engine, prompt, 1)
        assert not tier_of(engine).awaits_rows
    assert tier_of(engine).flush(60)
    assert tier_of(engine).view().spilled.n > 0
    engine.prefix_cache.close()


def test_what_the_disk_was_not_given_yet_is_copied_when_the_model_leaves(tmp_path: Path) -> None:
    limits = DeviceLimits(piece_bytes=3_000, unwritten_bytes=100_000)
    engine = engine_on(tmp_path, policy="full", ram=24_000, n_cells=8192, limits=limits)
    with standing(tier_of(engine)):
        assert ask(engine, chat(*((seed, 300) for seed in range(10)))).error is None
        assert not tier_of(engine).view().written.n
        engine.sleep()
    assert tier_of(engine).flush(60)
    assert max(tier_of(engine).folder.lengths) > 2_000
    assert engine.prefix_cache.close()
