"""The engine on a backend whose rows lie in a pool: nothing is held, everything else is as ever."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pyctl.cache.disk.store import DiskStore
from pyctl.cache.disk_tier import DiskTier
from pyctl.cache.persist import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.fake import FakeBackend
from pyctl.engine.pool.pool_plan import PoolPlan, StreamCounts
from pyctl.engine.snapshotter import PARK_MIN
from pyctl.prompt import Prompt
from tests.engine.drive import ask, cold
from tests.engine.test_engine import chat

LONG = 32_768
POOL = PoolPlan.of(11, LONG + 8192, 16, 1_000_000)


def turns(*lengths: int) -> Prompt:
    """A conversation of messages with random tokens."""
    tokens = [[63, *np.random.default_rng(i).integers(1, 60, n - 1)] for i, n in enumerate(lengths)]
    starts = np.cumsum([0, *lengths])[:-1]
    return Prompt.of(np.concatenate([*tokens, [63, 61, 62]]), [*starts, sum(lengths)])


def test_a_long_conversation_is_evaluated_once() -> None:
    """Three turns behind a long one, with another conversation in between: only what is new is evaluated."""
    backend = FakeBackend("hybrid", n_ctx=POOL.n_rows, n_ubatch=8192, pool=POOL)
    engine = Engine(backend, RamCache(64, None), EngineSettings(exact=True))
    first, second, third = turns(300, LONG), turns(300, LONG, 90, 50), turns(300, LONG, 90, 50, 70, 40)
    stats = {}
    for name, prompt in (
        ("first", first),
        ("second", second),
        ("other", chat((7, 400))),
        ("third", third),
    ):
        reply = ask(engine, prompt, 1)
        stats[name] = reply.done.stats
    assert reply.tokens == cold(FakeBackend("hybrid", n_ctx=POOL.n_rows, n_ubatch=8192), third, 1).tokens
    assert stats["first"].n_evaluated == len(first)
    assert (stats["second"].source, stats["second"].n_loaded) == ("live", 0), "its rows are where they were"
    assert stats["second"].n_evaluated == len(second) - first.end
    assert (stats["third"].source, stats["third"].n_loaded) == ("ram", second.end)
    assert stats["third"].n_evaluated == len(third) - second.end


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
@pytest.mark.parametrize("pools", [(POOL, None), (None, POOL)])
def test_files_do_not_depend_on_it(tmp_path: Path, kind: str, pools: Sequence[PoolPlan | None]) -> None:
    prompt, replies = turns(300, 700), []
    for pool in pools:
        backend = FakeBackend(kind, pool=pool)
        tier = DiskTier(DiskStore(tmp_path, "fake", None, min_tokens=100), DiskPolicy.parse("full"), cold_max=10240)
        engine = Engine(backend, RamCache(32, None), EngineSettings(exact=True), tier)
        replies.append(ask(engine, prompt))
        engine.snapshotter.close()
    written, read = replies
    assert read.tokens == written.tokens == cold(FakeBackend(kind), prompt).tokens
    assert (read.done.stats.source, read.done.stats.n_cached) == ("disk", prompt.end)
    assert read.done.stats.n_loaded == prompt.end


def test_a_reply_knows_what_was_read_for_it() -> None:
    backend = FakeBackend("hybrid", n_ubatch=64, pool=PoolPlan.of(2, 4096, 4, 4096 * 10))
    engine = Engine(backend, RamCache(32, None), EngineSettings(exact=True))
    first = ask(engine, turns(100, 28), 1).done.timings
    assert first.streamed == StreamCounts(n_bytes=40 * (64 + 100)), "batches behind 0, 64 and 100 tokens"
    again = ask(engine, turns(100, 28), 3).done.timings
    assert again.streamed == StreamCounts(n_bytes=40 * (100 + 131 + 132)), "and two tokens"
    assert backend.streamed == StreamCounts(first.streamed.n_bytes + again.streamed.n_bytes, 0.0)
    plain = ask(Engine(FakeBackend("hybrid"), RamCache(32, None), EngineSettings()), turns(100, 28), 1)
    assert plain.done.timings.streamed is None


def test_nothing_is_held_and_a_conversation_that_is_left_goes_to_ram() -> None:
    backend = FakeBackend("hybrid", pool=POOL)
    engine = Engine(backend, RamCache(32, None), EngineSettings(exact=True))
    ask(engine, turns(300, 2 * PARK_MIN))
    ask(engine, chat((9, 400)))
    segments = engine.snapshotter.cache.segments()
    assert segments
    assert all(segment.held is None and segment.rows.size for segment in segments)
