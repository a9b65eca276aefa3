"""The engine on a backend with rows in a pool behaves as without one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from pyctl.cache.device_limits import DeviceLimits
from pyctl.cache.prefix_cache import PARK_MIN
from pyctl.cache.ram import RamCache
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.pool_plan import PoolPlan
from pyctl.engine.request import Done
from pyctl.engine.sampling import Sampling
from pyctl.engine.worker import Worker
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.engine.drive import ask, cold, request, tier_on
from tests.unit.engine.messages import chat
from tests.unit.engine.scheduling import check_held
from tests.unit.server.fake import INFO

LONG = 32_768
POOL = PoolPlan.for_layers(11, LONG + 8192, 16, 1_000_000)


def turns(*lengths: int) -> Prompt:
    """Return a conversation of messages with random tokens."""
    tokens = [[63, *np.random.default_rng(i).integers(1, 60, n - 1)] for i, n in enumerate(lengths)]
    starts = np.cumsum([0, *lengths])[:-1]
    return Prompt.from_ids(np.concatenate([*tokens, [63, 61, 62]]), [*starts, sum(lengths)])


def test_a_long_conversation_is_evaluated_once() -> None:
    """Three turns behind a long one, with another conversation in between: only what is new is
    evaluated.
    """
    backend = FakeBackend("hybrid", n_ctx=POOL.n_rows, n_ubatch=8192, pool=POOL)
    engine = Engine(backend, RamCache(64, None), EngineSettings(exact=True))
    first = turns(300, LONG)
    second = turns(300, LONG, 90, 50)
    third = turns(300, LONG, 90, 50, 70, 40)
    stats = {}
    for name, prompt in (
        ("first", first),
        ("second", second),
        ("other", chat((7, 400))),
        ("third", third),
    ):
        reply = ask(engine, prompt, 1)
        stats[name] = reply.done.stats
    assert (
        reply.tokens
        == cold(FakeBackend("hybrid", n_ctx=POOL.n_rows, n_ubatch=8192), third, 1).tokens
    )
    assert stats["first"].n_evaluated == len(first)
    assert stats["second"].source == "live"
    assert stats["second"].n_evaluated == len(second) - first.end
    assert stats["third"].source == "ram"
    assert backend.n_loaded == second.end, "those of the second were where they were"
    assert stats["third"].n_evaluated == len(third) - second.end


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
@pytest.mark.parametrize("pools", [(POOL, None), (None, POOL)])
def test_files_do_not_depend_on_it(
    tmp_path: Path, kind: str, pools: Sequence[PoolPlan | None]
) -> None:
    prompt = turns(300, 700)
    replies = []
    for pool in pools:
        backend = FakeBackend(kind, pool=pool)
        tier = tier_on(tmp_path)
        engine = Engine(backend, RamCache(32, None), EngineSettings(exact=True), tier)
        replies.append(ask(engine, prompt))
        engine.prefix_cache.close()
    written, read = replies
    assert read.tokens == written.tokens == cold(FakeBackend(kind), prompt).tokens
    assert read.done.stats.source == "disk"
    assert read.done.stats.n_cached == prompt.end
    assert backend.n_loaded == prompt.end


def test_a_slot_file_brings_rows_back_to_their_places(tmp_path: Path) -> None:
    engine = Engine(FakeBackend("hybrid", pool=POOL), RamCache(0, 0), EngineSettings())
    worker = Worker(engine, INFO)
    admin = EngineAdmin(worker, engine)
    prompt = turns(300, 2 * PARK_MIN)
    try:
        list(worker.submit(request(prompt, 1)))
        admin.save(0, tmp_path / "file").result(60)
        list(worker.submit(request(chat((7, 400)), 1)))
        assert admin.restore(0, tmp_path / "file").result(60).n_tokens == len(prompt)
        done = list(worker.submit(request(Prompt.from_ids([*prompt.tokens, 7, 8, 9]), 1)))[-1]
        assert isinstance(done, Done)
        assert done.stats.source == "live"
        assert done.stats.n_evaluated == 3
    finally:
        worker.close()


def test_a_conversation_that_is_left_has_gone_to_ram_before() -> None:
    backend = FakeBackend("hybrid", pool=POOL)
    engine = Engine(backend, RamCache(32, None), EngineSettings(exact=True))
    ask(engine, turns(300, 2 * PARK_MIN))
    ask(engine, chat((9, 400)))
    snapshots = engine.prefix_cache.cache.snapshots()
    assert len(snapshots) > 3
    assert all(segment.rows.size for snapshot in snapshots for segment in snapshot.chain)


@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_a_short_request_leaves_the_rest_of_a_long_conversation_where_it_is(
    kind: Literal["hybrid", "attention"],
) -> None:
    """Though RAM has room for a half of it: only what is overwritten goes there, and comes back."""
    backend = FakeBackend(kind, pool=POOL)
    settings = EngineSettings(exact=True, device=DeviceLimits(piece_bytes=3_000))
    engine = Engine(backend, RamCache(64, 24_000), settings)
    messages = [(seed, 300) for seed in range(10)]
    ask(engine, chat(*messages))
    for turn in range(3):
        short = chat((50 + turn, 100))
        assert ask(engine, short).tokens == cold(FakeBackend(kind), short).tokens
        assert engine.prefix_cache.device.n_cells > 2_500
        end = chat(*messages).end
        messages.append((70 + turn, 40))
        reply = ask(engine, chat(*messages))
        assert reply.tokens == cold(FakeBackend(kind), chat(*messages)).tokens
        assert reply.done.stats.n_cached == end
        check_held(engine, backend)
    assert 0 < backend.n_loaded - engine.prefix_cache.device.counts.returned < 1_000
    other = chat(*((seed, 300) for seed in range(90, 101)))
    assert ask(engine, other).tokens == cold(FakeBackend(kind), other).tokens, (
        "who needs all of it takes it"
    )
    check_held(engine, backend)


def test_a_snapshot_of_generated_rows_is_none_of_exact_ones() -> None:
    engine = Engine(FakeBackend("hybrid", pool=POOL), RamCache(32, None), EngineSettings())
    ask(engine, turns(100, 228), 2 * PARK_MIN, sampling=Sampling(temperature=0.0, ignore_eos=True))
    ask(engine, chat((9, 400)))
    exact = {each.n: each.exact for each in engine.prefix_cache.cache.snapshots()}
    assert exact[328] is True
    assert exact[max(exact)] is False
    assert max(exact) > len(turns(100, 228)) + PARK_MIN
