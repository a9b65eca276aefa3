"""A store that is slow, or wrong and slow: a request waits for it once, for PATIENCE_SECONDS of the clock at most."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyctl.cache.disk.behind import PATIENCE_SECONDS, StoreBehind, connect
from pyctl.cache.disk.file_format import StateName
from pyctl.cache.disk.store import DiskStore
from pyctl.cache.disk_tier import DiskTier
from pyctl.cache.persist import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import PromptMatch
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from tests.fake import FakeBackend
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ManualClock, ask, chat, cold, collect, request
from tests.waiting import until

pytest.importorskip("obstore")

TURNS = [chat((1, 300)), chat((1, 300), (2, 240)), chat((1, 300), (2, 240), (3, 300))]

STORED = TURNS[-1]

STEPS = 400
"""Enough for any reply; of steps that wait, each takes a moment."""


class SlowClient:
    """A client whose reads of states wait for `gate`, and are damaged while `is_damaged`."""

    def __init__(self) -> None:
        self.client = connect("memory://")
        self.gate = threading.Event()
        self.gate.set()
        self.is_damaged = False
        self.n_states = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def get(self, path: str, **options: Any) -> Any:
        if not path.endswith(".state"):
            return self.client.get(path, **options)
        self.n_states += 1
        assert self.gate.wait(120)
        if self.is_damaged:
            data = bytes(self.client.get(path).bytes())
            self.client.put(path, data[:-1] + bytes([data[-1] ^ 1]))
        return self.client.get(path, **options)


Open = Callable[[str], Engine]


@pytest.fixture
def client() -> SlowClient:
    return SlowClient()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def engine_on(client: SlowClient, clock: ManualClock, tmp_path: Path) -> Iterator[Open]:
    """engine_on(name) -> an engine with a directory of that name, in front of the store of ``client``."""
    opened: list[Engine] = []

    def get(name: str) -> Engine:
        files = DiskStore(tmp_path / name, "fake", None, min_tokens=100)
        behind = StoreBehind(client, "memory://", files.files, files.sizes)  # type: ignore[arg-type]
        behind.clock = clock  # type: ignore[assignment]
        tier = DiskTier(files, DiskPolicy.parse("full"), cold_max=10240, close_seconds=60, behind=behind)
        opened.append(Engine(FakeBackend(n_seqs=2), RamCache(16, None), EngineSettings(exact=True), tier))
        return opened[-1]

    yield get
    client.gate.set()
    for engine in opened:
        engine.prefix_cache.close()


@pytest.fixture
def second(engine_on: Open) -> Engine:
    """An engine that has found what another one left in the store."""
    first = engine_on("first")
    for prompt in TURNS:
        ask(first, prompt)
    tier = first.prefix_cache.disk
    assert tier.flush(60)
    assert len(tier.entries()) > 1
    until(lambda: tier.behind.view().sent.n == len(tier.entries()))
    second = engine_on("second")
    found = second.prefix_cache.disk
    until(lambda: len(found.find(PromptMatch(STORED.tokens), len(STORED) - 1)) > 1)
    return second


def waits(engine: Engine) -> bool:
    """Whether some steps more evaluate nothing."""
    before = engine.backend.n_evaluated
    for _ in range(20):
        engine.step()
    return engine.backend.n_evaluated == before


def finish(engine: Engine, handle: RequestHandle) -> list[int]:
    """The tokens of a reply that waits for nothing more."""
    for _ in range(STEPS):
        if not engine.step():
            break
    reply = collect(handle)
    assert reply.error is None
    assert reply.done is not None, "it waits"
    return reply.tokens


def test_a_request_waits_for_one_second_of_the_clock(second: Engine, client: SlowClient, clock: ManualClock) -> None:
    client.gate.clear()
    handle = RequestHandle(request(STORED))
    second.submit(handle)
    assert waits(second)
    clock.advance(PATIENCE_SECONDS - 0.001)
    assert waits(second)
    clock.advance(0.001)
    assert finish(second, handle) == cold(FakeBackend(), STORED).tokens
    assert not client.gate.is_set()
    client.gate.set()
    check_invariants(second.prefix_cache.cache)


def test_what_was_fetched_in_vain_is_not_waited_for_again(
    second: Engine, client: SlowClient, clock: ManualClock
) -> None:
    """The deepest snapshot comes too late and is damaged; there are others, which would take as long."""
    client.gate.clear()
    client.is_damaged = True
    handle = RequestHandle(request(STORED))
    second.submit(handle)
    assert waits(second)
    clock.advance(PATIENCE_SECONDS)
    for _ in range(3):
        second.step()
    assert 0 < second.backend.n_evaluated < len(STORED)
    behind = second.prefix_cache.disk.behind
    client.gate.set()
    until(lambda: not behind._coming)
    client.gate.clear()
    assert finish(second, handle) == cold(FakeBackend(), STORED).tokens
    assert client.n_states == 1
    client.is_damaged = False
    client.gate.set()


def test_what_comes_in_time_is_waited_for(second: Engine, client: SlowClient) -> None:
    reply = ask(second, STORED)
    assert reply.tokens == cold(FakeBackend(), STORED).tokens
    assert reply.done is not None
    assert (reply.done.stats.source, reply.done.stats.n_cached > 300) == ("disk", True)
    assert client.n_states == 1


@pytest.mark.parametrize(
    ("fetching", "evaluating", "is_fetched"),
    [(0.3, 3.0, True), (3.0, 0.3, False), (3.0, 30.0, True), (30.0, 3.0, False)],
)
def test_each_request_takes_what_is_quicker_by_measured_costs(
    fetching: float, evaluating: float, is_fetched: bool, second: Engine, client: SlowClient, clock: ManualClock
) -> None:
    """Seconds for all of the prompt, of one bandwidth and one speed."""
    tier = second.prefix_cache.disk
    (deepest, *_) = tier.find(PromptMatch(STORED.tokens), len(STORED) - 1)
    n_bytes = sum(tier.behind._listing.sizes[name] for name in tier.behind._listing.chain(StateName.of(deepest)))
    tier.behind._costs.note_read(2**40, fetching * 2**40 / n_bytes)
    for _ in range(400):
        second.prefix_cache.cache.costs.note_evaluated(0, len(STORED), evaluating)
    assert tier.behind.seconds(deepest) == pytest.approx(fetching, rel=0.1)
    assert tier.costs.evaluate(0, len(STORED)) == pytest.approx(evaluating, rel=0.1)
    client.gate.clear()
    handle = RequestHandle(request(STORED))
    second.submit(handle)
    is_waiting = fetching <= PATIENCE_SECONDS
    assert waits(second) == is_waiting
    clock.advance(PATIENCE_SECONDS)
    assert finish(second, handle) == cold(FakeBackend(), STORED).tokens
    assert [state.prefix for state in tier.behind._coming] == [deepest] * is_fetched
