"""A request waits in the queue for what a store has of its prompt, where that is quicker, and
others are served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import PromptMatch
from pyctl.disk.remote_store import PATIENCE_SECONDS, RemoteStore
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from tests.fake import FakeBackend
from tests.unit.cache.checks import check_invariants
from tests.unit.disk.test_remote_store import Faulty
from tests.unit.engine.drive import ManualClock, Reply, ask, chat, cold, collect, request, tier_on
from tests.waiting import until

pytest.importorskip("obstore")

TURNS = [chat((1, 300)), chat((1, 300), (2, 240)), chat((1, 300), (2, 240), (3, 300))]

STORED = TURNS[-1]


@pytest.fixture
def client() -> Faulty:
    return Faulty()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def second(client: Faulty, clock: ManualClock, tmp_path: Path) -> Iterator[Engine]:
    """Yield an engine that has found what another one left in the store, and evaluates a token in a
    second.
    """
    opened: list[Engine] = []

    def get(name: str) -> Engine:
        remote = partial(RemoteStore, client, "memory://", clock=clock)
        tier = tier_on(tmp_path / name, remote=remote)
        opened.append(
            Engine(FakeBackend(n_seqs=2), RamCache(16, None), EngineSettings(exact=True), tier)
        )
        return opened[-1]

    first = get("first")
    for prompt in TURNS:
        ask(first, prompt)
    tier = first.prefix_cache.disk
    assert tier.flush(60)
    until(lambda: tier.remote.view().sent.n == len(tier.entries()) > 1)
    second = get("second")
    until(lambda: len(far(second)) > 1)
    measured(second, 1.0)
    yield second
    client.gate.set()
    for engine in opened:
        engine.prefix_cache.close()


def far(engine: Engine) -> list[Any]:
    return engine.prefix_cache.disk.find_remote(PromptMatch(STORED.tokens), len(STORED) - 1)


def measured(engine: Engine, seconds: float) -> None:
    """Let each token have taken so long."""
    for _ in range(4000):
        engine.prefix_cache.cache.costs.record_evaluated(0, 1000, 1000 * seconds)


def waits(engine: Engine) -> bool:
    """Return whether twenty more steps evaluate nothing."""
    before = engine.backend.n_evaluated
    for _ in range(20):
        engine.step()
    return engine.backend.n_evaluated == before


def begin(engine: Engine, **fields: Any) -> RequestHandle:
    handle = RequestHandle(request(STORED, **fields))
    engine.submit(handle)
    return handle


def finish(engine: Engine, handle: RequestHandle) -> Reply:
    """Return the reply of a request that waits for nothing more."""
    until(lambda: not engine.step())
    reply = collect(handle)
    assert reply.error is None
    assert reply.tokens == cold(FakeBackend(), STORED).tokens
    check_invariants(engine.prefix_cache.cache)
    return reply


def test_what_comes_in_time_is_restored(second: Engine) -> None:
    reply = finish(second, begin(second))
    assert reply.done.stats.source == "disk"
    assert reply.done.stats.n_cached > 300
    assert second.prefix_cache.disk.remote.view().fetched.n == 1


def test_others_are_served_while_a_request_waits(second: Engine, client: Faulty) -> None:
    client.gate.clear()
    handle = begin(second)
    assert waits(second)
    other = chat((7, 200))
    second.submit(RequestHandle(request(other)))
    assert not waits(second)
    assert second.n_waiting == 1
    client.gate.set()
    reply = finish(second, handle)
    assert reply.done.stats.source == "disk"


def test_a_request_waits_a_second_of_the_clock_for_a_store_that_hangs(
    second: Engine, client: Faulty, clock: ManualClock
) -> None:
    client.gate.clear()
    handle = begin(second)
    assert waits(second)
    clock.advance(PATIENCE_SECONDS - 0.001)
    assert waits(second)
    clock.advance(0.001)
    reply = finish(second, handle)
    assert reply.done.stats.n_cached == 0
    assert not client.gate.is_set()


def test_a_request_waits_twice_as_long_as_expected_while_bytes_come(
    second: Engine, client: Faulty, clock: ManualClock
) -> None:
    remote = second.prefix_cache.disk.remote
    client.gate.clear()
    handle = begin(second)
    prefix, seconds = max(far(second), key=lambda each: each[0].n)
    fetch = remote.fetch(prefix)
    end = clock() + 2 * seconds + PATIENCE_SECONDS
    while clock() + PATIENCE_SECONDS / 2 < end:
        fetch.move()
        assert waits(second)
        clock.advance(PATIENCE_SECONDS / 2)
    clock.advance(PATIENCE_SECONDS / 2)
    assert finish(second, handle).tokens


def test_a_cancelled_request_does_not_wait(second: Engine, client: Faulty) -> None:
    client.gate.clear()
    begin(second).cancel()
    until(lambda: not second.step())
    assert not second.n_waiting


CHANGES: dict[str, tuple[Callable[[Engine], object], dict[str, Any]]] = {
    "slow": (lambda engine: engine.prefix_cache.disk.remote.costs.record_read(2**40, 2.0**50), {}),
    "quick": (lambda engine: measured(engine, 1e-9), {}),
    "uncached": (lambda engine: None, {"cache_prompt": False}),
    "off": (lambda engine: None, {"disk_policy": DiskPolicy.parse("off")}),
    "restored": (lambda engine: ask(engine, STORED, cache_prompt=True), {}),
}


@pytest.mark.parametrize(("change", "fields"), CHANGES.values(), ids=CHANGES)
def test_nothing_is_fetched_that_would_not_pay(
    change: Callable[[Engine], object], fields: dict[str, Any], second: Engine, client: Faulty
) -> None:
    change(second)
    client.gate.clear()
    finish(second, begin(second, **fields))
