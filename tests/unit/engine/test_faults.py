"""Errors on the engine's thread: every waiting request fails, and the thread goes on or reports its
end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Failed, Piece
from pyctl.engine.worker import Worker, WorkerTimes
from pyctl.errors import EngineError, UnavailableError
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.engine.drive import ManualClock, request, tier_on
from tests.unit.engine.watched_worker import ENDLESS, PROMPT, result
from tests.unit.server.fake import INFO
from tests.waiting import until


class Faulty(FakeBackend):
    """Raises ``fault`` in as many evaluations as ``n_faults`` says, behind ``n_good`` of one token;
    waits for ``go_on`` while ``held``.
    """

    fault: BaseException = MemoryError("no memory left")
    n_faults = n_good = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held = False
        self.go_on = threading.Event()
        self.waits = threading.Event()

    def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._maybe()
        super().evaluate(*args, **kwargs)

    def decode(self, items: Any) -> None:
        if self.n_good:
            self.n_good -= 1
        else:
            self._maybe()
        super().decode(items)

    def _maybe(self) -> None:
        if self.held:
            self.waits.set()
            while not self.go_on.wait(0.01) and not self.interrupted.is_set():
                pass
            if self.interrupted.is_set():
                raise UnavailableError("the evaluation was stopped")
        if self.n_faults and not self.n_good:
            self.n_faults -= 1
            raise self.fault


LOOKS_OFTEN = WorkerTimes(watch=0.02)


@pytest.fixture
def faulty() -> Iterator[Callable[..., tuple[Faulty, Worker, Engine]]]:
    made: list[tuple[Faulty, Worker, Engine]] = []

    def make(
        *, is_held: bool = False, stall_seconds: float = 0, times: WorkerTimes = LOOKS_OFTEN
    ) -> tuple[Faulty, Worker, Engine]:
        backend = Faulty("hybrid")
        backend.held = is_held
        engine = Engine(backend, RamCache(8, None), EngineSettings())
        worker = Worker(engine, INFO, stall_seconds=stall_seconds, times=times)
        made.append((backend, worker, engine))
        return made[-1]

    yield make
    for backend, worker, _ in made:
        backend.go_on.set()
        worker.close(5)


def end(handle: RequestHandle) -> Any:
    """Return the last event of a reply, waiting a minute at most."""
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend(handle), daemon=True)
    reader.start()
    reader.join(60)
    assert not reader.is_alive(), "the request waits for ever"
    return found[-1]


def error_of(handle: RequestHandle) -> Exception:
    """Return the error with which a request ends."""
    event = end(handle)
    assert isinstance(event, Failed)
    return event.error


def check_serves(worker: Worker) -> None:
    assert isinstance(end(worker.submit(request(PROMPT))), Done)


def test_running_out_of_memory_in_decode_fails_that_reply_and_no_other(faulty: Any) -> None:
    backend, worker, _ = faulty()
    check_serves(worker)
    backend.n_good = 20
    backend.n_faults = 1
    handle = worker.submit(request(PROMPT, 3000, sampling=ENDLESS))
    assert isinstance(next(handle), Piece)
    error = error_of(handle)
    assert isinstance(error, EngineError)
    assert "no memory left" in str(error)
    check_serves(worker)
    assert worker.trouble is None


def test_failed_step_fails_all_requests_and_engine_goes_on(faulty: Any) -> None:
    backend, worker, engine = faulty(is_held=True)
    handles = [worker.submit(request(PROMPT)) for _ in range(3)]
    assert backend.waits.wait(60)
    whole = engine.step

    def step() -> bool:
        engine.step = whole
        raise MemoryError

    engine.step = step
    backend.held = False
    backend.go_on.set()
    for handle in handles:
        assert "MemoryError" in str(error_of(handle))
    check_serves(worker)


def test_a_thread_that_ends_fails_everything_now_and_later(faulty: Any) -> None:
    """Requests that run or wait, calls of the admin and all later ones fail with the error that
    ended the engine's thread, so that no client waits forever.
    """
    backend, worker, engine = faulty(is_held=True)
    running = worker.submit(request(PROMPT))
    waiting = worker.submit(request(PROMPT))
    admin = EngineAdmin(worker, engine)
    assert backend.waits.wait(60)
    erased = admin.erase(0)
    backend.fault = SystemExit("gone")
    backend.n_faults = 1
    backend.held = False
    backend.go_on.set()
    for handle in (running, waiting):
        assert "gone" in str(error_of(handle))
    for future in (erased, admin.view(), admin.stats()):
        with pytest.raises(EngineError, match="gone"):
            result(future)
    with pytest.raises(UnavailableError, match="gone"):
        worker.submit(request(PROMPT))
    with pytest.raises(EngineError, match="gone"):
        worker.watch()
    assert not worker.close()


def test_steps_that_fail_again_and_again_end_the_thread(faulty: Any) -> None:
    _, worker, engine = faulty()

    engine.step = Mock(side_effect=RuntimeError("broken for good"))
    error_of(worker.submit(request(PROMPT)))
    with pytest.raises(EngineError, match="broken for good"):
        worker.watch()


def test_an_evaluation_that_hangs_is_noticed_and_everything_fails(faulty: Any) -> None:
    # Longer than this test may take.
    times = replace(LOOKS_OFTEN, finish=3600.0, step=3600.0)
    _, worker, _ = faulty(is_held=True, stall_seconds=0.3, times=times)
    handles = [worker.submit(request(PROMPT)) for _ in range(2)]
    with pytest.raises(EngineError, match="makes no progress"):
        worker.watch()
    for handle in handles:
        error_of(handle)
    assert not worker.close(), "a hanging thread is not waited for"


def test_a_long_evaluation_that_makes_progress_is_left_alone(
    faulty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog takes a changing heartbeat for progress and an idle engine for no stall, however
    long either lasts. It would otherwise end a healthy server in a long prefill.
    """
    backend, worker, _ = faulty(is_held=True, stall_seconds=0.3)
    looks: list[int] = []
    is_idle = threading.Event()
    heartbeat = property(lambda _: looks.append(1) or (1 if is_idle.is_set() else len(looks)))
    monkeypatch.setattr(Faulty, "heartbeat", heartbeat, raising=False)
    watched: list[object] = []

    def watch() -> None:
        try:
            watched.append(worker.watch())
        except EngineError as error:
            watched.append(error)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()

    def look(n: int) -> None:
        """Wait until it was looked at ``n`` times, each time a fiftieth of a second later at
        least.
        """
        seen = len(looks)
        until(lambda: len(looks) >= seen + n)

    handle = worker.submit(request(PROMPT))
    assert backend.waits.wait(60)
    look(50)  # at each there is something new
    backend.held = False
    backend.go_on.set()
    assert isinstance(end(handle), Done)
    while worker._working:
        look(1)
    is_idle.set()
    look(50)  # idle is no stall
    worker.close()
    watching.join(60)
    assert watched == [None]


@pytest.mark.parametrize("stops", [True, False])
def test_close_interrupts_a_long_evaluation_or_reports_it(faulty: Any, stops: bool) -> None:
    """A call of close interrupts a long evaluation, or reports that the device could not be
    interrupted.
    """
    backend, worker, _ = faulty(is_held=True, times=replace(LOOKS_OFTEN, finish=0.1))
    if not stops:
        backend.interrupt = lambda: None
    handle = worker.submit(request(Prompt.from_ids([5] * 200)))
    assert backend.waits.wait(60)
    assert worker.close(60 if stops else 0.3) is stops
    assert isinstance(error_of(handle), UnavailableError), (
        "the request does not wait for the evaluation"
    )
    assert backend.closed is stops


class Remote(Faulty):
    """Its device is lost from ``is_lost`` on: what asks the memory then fails the test."""

    is_lost = False

    @property
    def heartbeat(self) -> int:
        if self.is_lost:
            raise EngineError("the worker a:1 is lost")
        return 0

    @heartbeat.setter
    def heartbeat(self, _: int) -> None:
        """Ignore the heartbeat: the value that the class before sets stays unused."""

    def _maybe(self) -> None:
        if self.held:
            self.waits.set()
            threading.Event().wait()

    def unload(self) -> None:
        self.can_hold = False
        super().unload()

    def fetch(self, held: Any, first: int, last: int) -> Any:
        assert not self.is_lost
        return super().fetch(held, first, last)

    def release(self, held: Any) -> None:
        assert not self.is_lost or self.closed
        super().release(held)


def test_the_loss_of_a_device_ends_the_service_with_the_cache_on_disk(tmp_path: Path) -> None:
    """The cache in RAM is written, whether the engine's thread is idle or in a call that never
    returns.
    """
    for is_idle, has_disk in ((True, False), (True, True), (False, False), (False, True)):
        backend = Remote("hybrid")
        tier = tier_on(tmp_path / str(is_idle)) if has_disk else None
        if tier is not None:
            tier.policy = DiskPolicy.from_flag("spill")  # all is written in the end
        engine = Engine(
            backend, RamCache(8, None), EngineSettings(), tier, clock=ManualClock()
        )  # no time passes
        worker = Worker(engine, INFO, times=replace(LOOKS_OFTEN, still=0.2))
        check_serves(worker)
        if not is_idle:
            backend.held = True
            handle = worker.submit(request(Prompt.from_ids([5] * 200)))
            assert backend.waits.wait(60)
        backend.is_lost = True
        with pytest.raises(EngineError, match="the worker a:1 is lost"):
            worker.watch()
        assert backend.closed
        if not is_idle:
            error_of(handle)
        with pytest.raises(UnavailableError, match="is lost"):
            worker.submit(request(PROMPT))
        assert tier is None or 290 in tier_on(tmp_path / str(is_idle)).folder.lengths
        assert all(segment.held is None for segment in engine.prefix_cache.cache.segments())
