"""The routes that only read from the engine answer while a step takes its time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyctl.cache.snapshot import BlockBytes
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Request
from pyctl.prompt import Prompt
from pyctl.server.server_settings import ServerSettings
from tests.unit.engine.drive import request, tier_on
from tests.unit.engine.test_slow_disk import HangingDrive
from tests.unit.server.fake import Bench
from tests.waiting import until

HEAD = "x" * 200


class HeldRows:
    """A server whose engine is within an evaluation until ``go_on``: of a prompt or, by name, of a
    reply's token.
    """

    def __init__(self, what: str) -> None:
        self.bench = Bench(settings=ServerSettings(show_metrics=True), n_seqs=2)
        first = self.bench.post("/completion", {"prompt": HEAD, "n_predict": 2, "ignore_eos": True})
        assert first.status_code == 200, first.text
        self.begun = threading.Event()
        self.go_on = threading.Event()
        backend: Any = self.bench.engine.backend
        evaluate = getattr(backend, what)

        def held(*args: Any, **kwargs: Any) -> None:
            self.begun.set()
            assert self.go_on.wait(120)
            evaluate(*args, **kwargs)

        setattr(backend, what, held)
        self.handle: RequestHandle = self.bench.worker.submit(self.asked())
        assert self.begun.wait(60)

    def asked(self) -> Request:
        return request(Prompt.from_ids([5, 6, 7] * 50), 4)


@pytest.fixture(params=["evaluate", "decode"])
def held(request: pytest.FixtureRequest) -> Iterator[HeldRows]:
    server = HeldRows(request.param)
    yield server
    server.go_on.set()
    assert list(server.handle)[-1]


def test_slots_show_the_request_that_is_evaluated(held: HeldRows) -> None:
    slots = held.bench.client.get("/slots").json()
    assert sorted(slot["is_processing"] for slot in slots) == [False, True]
    assert held.bench.client.get("/slots?fail_on_no_slot=1").status_code == 200
    assert not held.go_on.is_set()


def test_the_cache_metrics_and_properties_are_shown(held: HeldRows) -> None:
    cache = held.bench.client.get("/cache").json()
    assert [sequence["busy"] for sequence in cache["sequences"]].count(True) == 1
    assert held.bench.client.get(f"/cache?since={cache['revision']}").json() == {
        "revision": cache["revision"]
    }
    assert cache["memory"]["snapshots"] == cache["bytes"]["resident"]
    assert "llamacpp:requests_processing 1\n" in held.bench.client.get("/metrics").text
    assert (
        held.bench.client.get("/props").json()["prefix_cache"]["in_use"] == cache["slots"]["in_use"]
    )


def check_reads(bench: Bench) -> None:
    assert len(bench.client.get("/slots").json()) == 2
    assert bench.client.get("/cache").json()["sequences"]
    assert "llamacpp:requests_processing" in bench.client.get("/metrics").text
    assert "prefix_cache" in bench.client.get("/props").json()


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_reads_answer_while_a_request_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The routes that only read answer while the engine waits for a file, so that a monitor does
    not take a slow disk for a dead server.
    """

    def bench() -> Bench:
        disk = tier_on(tmp_path)
        return Bench(settings=ServerSettings(show_metrics=True), n_seqs=2, disk=disk)

    first = bench()
    assert (
        first.post(
            "/completion", {"prompt": "y" * 300, "n_predict": 2, "ignore_eos": True}
        ).status_code
        == 200
    )
    first.worker.close()
    drive = HangingDrive(monkeypatch)
    server = bench()
    until(lambda: server.service.admin.stored() != [])
    drive.hang(call)
    handle = server.worker.submit(request(first.worker.requests[0].prompt, 2))
    try:
        assert drive.waiting.wait(60)
        check_reads(server)
        assert not drive.gate.is_set(), "the file is still being read"
    finally:
        drive.gate.set()
    assert list(handle)[-1].stats.source == "disk"


def test_reads_answer_while_a_model_is_loaded_again() -> None:
    """The routes that only read answer while a sleeping model is loaded, which can take minutes."""
    server = Bench(settings=ServerSettings(show_metrics=True), n_seqs=2)
    begun = threading.Event()
    go_on = threading.Event()
    backend: Any = server.engine.backend
    load = backend.load

    def held() -> None:
        begun.set()
        assert go_on.wait(120)
        load()

    server.worker.call(server.engine.sleep).result(60)
    backend.load = held
    handle = server.worker.submit(request(Prompt.from_ids([5, 6, 7] * 50), 4))
    try:
        assert begun.wait(60)
        check_reads(server)
    finally:
        go_on.set()
    assert isinstance(list(handle)[-1], Done)


def test_what_the_memory_tells_is_as_of_the_last_step_that_was_asked(held: HeldRows) -> None:
    admin = held.bench.service.admin
    backend = held.bench.engine.backend
    before = admin.memory().result(0)
    backend.block_bytes = lambda: BlockBytes(0, 12345, 0)
    assert admin.memory().result(0).blocks == before.blocks
    held.go_on.set()
    held.bench.worker.call(lambda: None).result(60)
    assert admin.memory().result(60).blocks.held == 12345
