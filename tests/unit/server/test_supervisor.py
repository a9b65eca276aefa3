"""Several models under any sequence of requests, loads, unloads, reloads and time: rules that hold
after each step.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, cast
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyctl.errors import ModelError, PyctlError, RequestError
from pyctl.server.app_state import AppState, HttpService
from pyctl.server.load_order import MAX_HELD_SECONDS, LoadOrder
from pyctl.server.model_card import ModelCard
from pyctl.server.models import RETRY_SECONDS, Lease, Models, ModelSource, Progress
from pyctl.server.supervisor import Supervisor
from tests.effort import examples

NAMES = st.sampled_from(("a", "b", "c", "d"))


class Fleet:
    """The loaded fakes, within ``room`` bytes; ``broken`` ones fail to load."""

    def __init__(self, room: int) -> None:
        self.room, self.broken, self.replaced = room, set[str](), set[str]()
        self.sizes = {"a": 1, "b": 2, "c": 3, "d": 9}  # d never fits beside another
        self.loaded = set[str]()

    def free(self) -> int:
        return self.room - sum(self.sizes[name] for name in self.loaded)


class FakeWorker:
    """A worker whose calls end at once; loading beyond the room fails, as on a card."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet = fleet
        self.name = name
        self.is_closed = threading.Event()

    def load(self) -> Future[None]:
        done: Future[None] = Future()
        try:
            if self.name in self.fleet.replaced:
                raise ModelError("the model file has changed")
            self.take()
            done.set_result(None)
        except ModelError as error:
            done.set_exception(error)
        return done

    def take(self) -> None:
        if self.name in self.fleet.broken:
            raise ModelError(f"{self.name} is broken")
        assert self.name not in self.fleet.loaded
        assert self.fleet.sizes[self.name] <= self.fleet.free() or not self.fleet.loaded, (
            "more than there is room for"
        )
        self.fleet.loaded.add(self.name)

    def unload(self) -> Future[None]:
        self.fleet.loaded.discard(self.name)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def end_requests(self, reason: PyctlError) -> None:
        """They end by themselves here."""

    def watch(self) -> None:
        """Return at once: as one that was closed."""

    def close(self, *, unload: bool = True) -> bool:
        return True


class FakeService:
    """A service as `Models` uses it."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.worker = FakeWorker(fleet, name)
        self.admin = self

    def n_kept(self) -> Future[int]:
        done: Future[int] = Future()
        done.set_result(0)
        return done


class FakeLoader:
    """Makes fakes; ``fits`` answers as a memory plan does."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet = fleet
        self.name = name

    def load(self, report: Progress) -> HttpService:
        service = FakeService(self.fleet, self.name)
        service.worker.take()
        self.fleet.replaced.discard(self.name)
        return cast(HttpService, service)

    def fits(self) -> bool:
        return self.fleet.sizes[self.name] <= self.fleet.free()

    def is_current(self) -> bool:
        return self.name not in self.fleet.replaced


class ModelMachine(RuleBasedStateMachine):
    """Runs the steps of the thread that loads models itself, with a clock of its own."""

    @initialize(
        maximum=st.integers(0, 3), patience=st.sampled_from((0.0, 0.5)), keeps=st.booleans()
    )
    def begin(self, maximum: int, patience: float, keeps: bool) -> None:
        self.now = 0.0
        self.maximum = maximum
        self.fleet = Fleet(4)
        self.version = 0
        self.keeps = keeps and maximum != 1
        self.patched = patch("pyctl.server.supervisor.collect_all")  # it takes a tenth of a second
        self.patched.start()
        self.models = Models(
            AppState(), self.find, LoadOrder(maximum, patience), clock=lambda: self.now
        )
        self.models.changed = cast(Any, Stepped())
        self.supervisor = Supervisor(self.models)
        self.waiting: list[tuple[str, float, Future[Lease]]] = []
        self.running: list[tuple[str, Lease]] = []

    def find(self) -> list[ModelSource]:
        return [
            ModelSource(
                ModelCard(name, preset=f"c = {self.version}" if name == "b" else ""),
                FakeLoader(self.fleet, name),
                keeps=self.keeps and name == "a",
                stop_seconds=1.0,
            )
            for name in "abcd"
        ]

    def drive(self) -> None:
        for _ in range(12):
            self.supervisor.step()
        ended = [each for each in self.waiting if each[2].done()]
        self.waiting = [each for each in self.waiting if not each[2].done()]
        for name, _, future in ended:
            if (error := future.exception()) is None:
                self.running.append((name, future.result()))
            assert "has changed" not in str(error), (
                "a request is served with the file that is there"
            )

    @rule(name=NAMES)
    def ask(self, name: str) -> None:
        self.waiting.append((name, self.now, self.models.acquire(self.models.get(name))))
        self.drive()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, lease = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        lease.close()
        self.drive()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        _, _, future = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert future.cancel()
        self.drive()

    @rule(name=NAMES, load=st.booleans())
    def manage(self, name: str, load: bool) -> None:
        with suppress(RequestError):  # it is loaded already, or not loaded
            (self.models.load if load else self.models.unload)(self.models.get(name))
        self.drive()

    @rule(name=NAMES)
    def break_or_mend(self, name: str) -> None:
        self.fleet.broken ^= {name}

    @rule(name=NAMES)
    def replace_file(self, name: str) -> None:
        if name not in self.fleet.loaded:
            self.fleet.replaced.add(name)

    @rule()
    def reload(self) -> None:
        self.version += 1
        self.models.reload()
        self.drive()

    @rule(seconds=st.sampled_from((0.1, 1.0, RETRY_SECONDS)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.drive()

    @invariant()
    def rules_hold(self) -> None:
        if not hasattr(self, "models"):
            return
        loaded = {model.name for model in self.models if self.models.order.is_loaded(model.name)}
        assert loaded == self.fleet.loaded
        assert not self.maximum or len(loaded) <= self.maximum
        assert len(loaded) < 2 or self.fleet.free() >= 0, "more than there is room for"
        assert {name for name, _ in self.running} <= loaded, "one that serves has left"

    def teardown(self) -> None:
        if not hasattr(self, "models"):
            return
        # Replies end and time passes: then each request has run, or got an error, within one hold
        # for each model.
        began = self.now
        while self.waiting or self.running or self.models.futures:
            assert self.now - began <= 5 * (MAX_HELD_SECONDS + RETRY_SECONDS), "a request starves"
            for _, lease in self.running:
                lease.close()
            self.running = []
            self.now += 0.5
            self.drive()
        self.patched.stop()


class Stepped:
    """An event for which no thread waits: `drive` calls the steps of the thread, and time passes
    between them.
    """

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def wait(self, seconds: float | None = None) -> None: ...


ModelMachine.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=40, deadline=None
)
TestModelMachine = ModelMachine.TestCase
