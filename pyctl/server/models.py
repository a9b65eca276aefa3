"""The models of a process: one that is there from the start, or several that are loaded when a request names them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

from pyctl.engine.engine_settings import Clock
from pyctl.errors import BusyError, ConfigError, EngineError, ModelError, PyctlError, RequestError, UnavailableError
from pyctl.limit import limit
from pyctl.server.load_order import LoadOrder, Ticket
from pyctl.server.memory import collect_all
from pyctl.server.service import Service, Shared

__all__ = ["Lease", "ModelCard", "ModelSource", "Models", "Progress", "ServedModel", "Status", "give_back_lease"]

log = logging.getLogger("pyctl")

RETRY_SECONDS = limit(
    10.0, "after a model failed to load", "requests for it get the same error, and nothing else leaves", "process", "s"
)

PROGRESS_STEP = 0.05
"""Fraction of loading between two events about it."""

MOST_HELD = limit(1024, "requests that wait for a model to be loaded", "503 with Retry-After", "process")

Status: TypeAlias = Literal["unloaded", "loading", "loaded", "sleeping"]

Progress: TypeAlias = Callable[[float], bool]

Listener: TypeAlias = Callable[[Mapping[str, Any] | None], None]
"""Gets events of models, and None at the end of the process."""


@dataclass(frozen=True)
class ModelCard:
    """Public facts of a model before it is loaded; ``origin`` is where it was found, ``preset`` its section
    of a preset file, ``args`` its flags. One that ``is_hidden`` is in no list."""

    name: str
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    path: str = ""
    origin: str = "preset"
    args: tuple[str, ...] = ()
    preset: str = ""
    vision: bool = False
    is_hidden: bool = False


class LoadsModel(Protocol):
    """Makes one model's service; the thread that loads models calls it."""

    def load(self, report: Progress) -> Service:
        """A new service; ``report`` gets fractions and returns whether to go on."""

    def is_current(self) -> bool:
        """Whether the model's files are still those that `load` read last, as far as can be told. Blocks on files."""

    def fits(self) -> bool:
        """Whether the model has room beside those that are loaded. Raises ModelError if it cannot be loaded."""


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded. Two are equal if one behaves as the other: ``settings`` are all that it has, of
    which the card leaves secrets out.

    With ``keeps`` it leaves for no other. After ``sleep_seconds`` without a request it is unloaded (negative: never);
    an unload that a client asks for waits ``stop_seconds`` for replies.
    """

    card: ModelCard
    loader: LoadsModel = field(compare=False)
    on_start: bool = False
    keeps: bool = False
    stop_seconds: float = 10.0
    sleep_seconds: float = -1.0
    settings: object = None


@dataclass(eq=False)
class ServedModel:
    """One model with its state; ``service`` stays from the first load on, with the cache. ``used`` is a UNIX time.
    One that ``is_outdated`` has other files than those that were loaded."""

    source: ModelSource
    service: Service | None = None
    status: Status = "unloaded"
    error: PyctlError | None = None
    failed_at: float = 0.0
    used: float = 0.0
    load_seconds: float = 0.0
    unload_at: float | None = None
    is_outdated: bool = False
    watcher: threading.Thread | None = None

    @property
    def name(self) -> str:
        """The name by which clients know it."""
        return self.source.card.name


@dataclass(frozen=True)
class Lease:
    """A loaded model, which stays loaded until `close`."""

    service: Service
    close: Callable[[], None] = field(default=lambda: None)


class Models:
    """All models of a process, by name and alias. Thread-safe.

    One thread loads and unloads, one model after the other, in the order of `LoadOrder`; the models' threads run
    meanwhile. An unloaded model keeps its engine, its vocabulary and its cache. If the engine of a model fails, the
    process ends, as with one model: a device that failed is of use to no other.
    """

    def __init__(
        self,
        shared: Shared,
        find: Callable[[], Iterable[ModelSource]] = tuple,
        order: LoadOrder | None = None,
        *,
        autoload: bool = True,
        clock: Clock = time.monotonic,
    ) -> None:
        self.shared, self.autoload = shared, autoload
        self.only: Service | None = None
        """The one model of a process that serves no other."""
        self._order, self._clock, self._find = order or LoadOrder(0, 0.0), clock, find
        self._models = {source.card.name: ServedModel(source) for source in find()}
        self._names = _by_name(self._models.values())
        self._wanted = {name: model.source for name, model in self._models.items()}
        self._reading = threading.Lock()  # held while `reload` looks for models
        self._reloads: list[Future[None]] = []
        self._is_stale = False  # whether something changed since the thread last looked
        self._changed = threading.Condition()  # guards what follows, and the order
        self._futures: dict[Ticket, Future[Lease]] = {}
        self._left: dict[str, float] = {}  # what left for the model that is about to be loaded, and when that began
        self._listeners: list[Listener] = []
        self._closing = threading.Event()
        self._trouble: PyctlError | None = None
        self._thread = threading.Thread(target=self._run, name="pyctl-models", daemon=True)

    @classmethod
    def of(cls, service: Service) -> Models:
        """The models of a process with one, which is loaded."""
        models = cls(service.shared)
        models.only = service
        return models

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(tuple(self._models.values()))

    @property
    def most(self) -> int:
        """Models that may be loaded at the same time, 0 for no limit."""
        return self._order.most

    @property
    def sees_images(self) -> bool:
        """Whether some model has a vision encoder."""
        return self.only.info.vision if self.only else any(model.source.card.vision for model in self._models.values())

    @property
    def trouble(self) -> PyctlError | None:
        """The error that ended the service of all, None while it runs."""
        return self.only.worker.trouble if self.only is not None else self._trouble

    @property
    def last_used(self) -> ServedModel | None:
        """The model that served a request last, of those that have been loaded."""
        known = [model for model in self._models.values() if model.service is not None]
        return max(known, key=lambda model: model.used, default=None)

    @property
    def services(self) -> list[Service]:
        """The models that have been loaded, in memory or not."""
        if self.only is not None:
            return [self.only]
        return [model.service for model in self._models.values() if model.service is not None]

    @property
    def n_saved(self) -> int | None:
        """Snapshots that this process wrote to disk, None without one; also after the end."""
        found = [n for service in self.services if (n := service.admin.n_saved) is not None]
        return sum(found) if found else None

    def find(self, name: str) -> ServedModel | None:
        """The model called ``name``, or with that alias; Ollama's clients add a tag."""
        known = self._names.get(name) or self._names.get(name.removesuffix(":latest"), "")
        return self._models.get(known)

    def named(self, name: str) -> ServedModel:
        """The model called ``name``. Raises RequestError in llama-server's words."""
        if not name:
            raise RequestError("model name is missing from the request")
        if (model := self.find(name)) is None:
            raise RequestError(f"model '{name}' not found")
        return model

    def is_loaded(self, model: ServedModel) -> bool:
        """Whether a request could run at once."""
        return self._order.is_loaded(model.name)

    # -- requests ----------------------------------------------------------------------------------------------------

    def ask(self, model: ServedModel) -> Future[Lease]:
        """The model for one request, once it is loaded; loads it if need be. Cancel the future to wait no longer.

        The future raises ModelError if the model cannot be loaded, and UnavailableError at the end of the process.
        """
        future: Future[Lease] = Future()
        ticket = Ticket(model.name, self._clock())
        with self._changed:
            if self._closing.is_set():
                future.set_exception(UnavailableError("the server is shutting down"))
                return future
            if (known := self._models.get(model.name)) is None:
                future.set_exception(RequestError(f"model '{model.name}' not found"))  # a reload has removed it
                return future
            model = known
            if len(self._futures) >= MOST_HELD:
                future.set_exception(BusyError(len(self._futures)))
                return future
            if model.error is not None and self._clock() - model.failed_at < RETRY_SECONDS:
                future.set_exception(model.error)
                return future
            self._futures[ticket] = future
            self._order.ask(ticket)
            self._admit()
            self._wake()
        future.add_done_callback(lambda done: self._given_up(ticket) if done.cancelled() else None)
        return future

    def load(self, model: ServedModel) -> None:
        """Load the model soon. Raises RequestError if it is loaded or being loaded."""
        with self._changed:
            if model.status in ("loaded", "loading"):
                raise RequestError("model is already running")
            model.error, model.failed_at = None, 0.0
        self.ask(model).add_done_callback(_close_at_once)

    def unload(self, model: ServedModel) -> None:
        """Unload the model soon: after its replies, or when these take too long. Raises RequestError if it is not
        loaded."""
        with self._changed:
            if self._models.get(model.name) is not model:
                raise RequestError("model is not running")  # replaced meanwhile
            if model.status == "sleeping":
                return self._set(model, "unloaded")
            if not self._order.is_loaded(model.name):
                raise RequestError("model is not running")
            self._let_go(model)

    def reload(self) -> Future[None]:
        """Look again which models there are; the future ends when they are those. Blocks on files.

        A model that is gone or has other settings or files is unloaded first, as by `unload`, and its snapshots in RAM
        go; the other models stay as they are. Raises ConfigError as at the start, and changes nothing then.
        """
        done: Future[None] = Future()
        with self._reading:
            wanted = {source.card.name: source for source in self._find()}
            _by_name(map(ServedModel, wanted.values()))
            outdated = [model for model in self if model.service is not None and not model.source.loader.is_current()]
            with self._changed:
                self._wanted = wanted
                for model in outdated:
                    model.is_outdated = True
                if self._closing.is_set():
                    raise UnavailableError("the server is shutting down")
                self._reloads.append(done)
                self._wake()
        return done

    @property
    def n_listeners(self) -> int:
        """Listeners to events."""
        return len(self._listeners)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with each event, on any thread; returns what ends that."""
        with self._changed:
            self._listeners.append(listener)

        def end() -> None:
            with self._changed, suppress(ValueError):
                self._listeners.remove(listener)

        return end

    # -- the life of the process -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Load what is to be there from the start, then serve until `close`. Raises EngineError if an engine fails."""
        if self.only is not None:
            return self.only.worker.watch()
        self._thread.start()
        self._load_first()
        self._closing.wait()
        if self._trouble is not None:
            raise self._trouble

    def _load_first(self) -> None:
        for model in self._models.values():
            if model.source.on_start:
                self.load(model)

    def close(self) -> bool:
        """End all requests and all engines; whether all is written that was to be kept. Idempotent."""
        with self._changed:
            self._closing.set()
            self._tell(None)
            for future in self._take_futures():
                future.set_exception(UnavailableError("the server is shutting down"))
            for reload in self._reloads:
                reload.set_exception(UnavailableError("the server is shutting down"))
            self._reloads = []
            self._wake()
        services = self.services
        complete: list[bool] = []
        closers = [
            threading.Thread(target=lambda each=each: complete.append(each.worker.close(unload=False)), daemon=True)
            for each in services
        ]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        return len(complete) == len(services) and all(complete)

    # -- the thread that loads ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._step()
            except Exception:
                log.exception("the thread that loads models failed in one step")
                self._closing.wait(1.0)

    def _step(self) -> None:
        """Unload or load one model, or wait until something changes."""
        with self._changed:
            now, self._is_stale = self._clock(), False
            leaving = self._to_unload(now)
        if leaving is not None:
            return self._unload(*leaving)
        if self._reloads:
            self._adopt()
        with self._changed:
            # Until a reload is finished, what is waited for may be a model that it replaces.
            name = self._order.next_model if not self._reloads else None
        if name is not None:
            model = self._models[name]
            try:
                # Before any model is unloaded for it: an invalid file affects no other model.
                has_room = not self._any_loaded() or model.source.loader.fits()
            except Exception as error:
                return self._failed(model, error)
            with self._changed:
                is_full, victim = self._order.is_full or not has_room, self._order.victim(now)
                if is_full and self._order.is_stuck:
                    return self._failed(
                        model, ModelError("all loaded models are kept, and there is no room for one more")
                    )
            if not is_full or not self._any_loaded():
                return self._load(model)
            if victim is not None:
                return self._unload(self._models[victim], "unloaded", for_another=True)
        elif not self._reloads:
            self._left = {}
        with self._changed:
            self._admit()
            if not self._closing.is_set() and not self._is_stale:
                self._changed.wait(self._seconds(now))

    def _adopt(self) -> None:
        """Finish reloads, once the models that they replace or remove are unloaded."""
        with self._changed:
            outdated = [
                model
                for name, model in self._models.items()
                if model.is_outdated or self._wanted.get(name) != model.source
            ]
            loaded = [model for model in outdated if self._order.is_loaded(model.name)]
            for model in loaded:
                self._let_go(model)
            if loaded:
                return
            kept = {name: model for name, model in self._models.items() if model not in outdated}
            self._models = {name: kept.get(name) or ServedModel(self._wanted[name]) for name in self._wanted}
            self._names = _by_name(self._models.values())
            for model in outdated:
                if model.name not in self._models:
                    self._refuse(model.name, RequestError(f"model '{model.name}' not found"))
            done, self._reloads = self._reloads, []
            self._tell({"model": "*", "event": "models_reload"})
        for model in outdated:
            log.info("%s %s", model.name, "has other settings or files" if model.name in self._models else "is gone")
            _close(model)
            del model
        # What threads still use, such as one that prepares a vocabulary, goes with the next reload.
        outdated.clear()
        collect_all()
        for future in done:
            future.set_result(None)

    def _any_loaded(self) -> bool:
        return any(self._order.is_loaded(name) for name in self._models)

    def _to_unload(self, now: float) -> tuple[ServedModel, Status] | None:
        """A model that a client or its idle time unloads now, and its state then."""
        for name, model in self._models.items():
            since = self._order.rests_since(name)
            if model.unload_at is not None:
                if since is not None:
                    return model, "unloaded"
                if now >= model.unload_at and model.service is not None:
                    model.unload_at = now + model.source.stop_seconds
                    model.service.worker.end_requests(UnavailableError(f"the model {name} was unloaded"))
            if since is not None and 0 <= model.source.sleep_seconds <= now - since:
                return model, "sleeping"
        return None

    def _seconds(self, now: float) -> float | None:
        """Seconds until the thread has to look again without an event."""
        due = [model.unload_at - now for model in self._models.values() if model.unload_at is not None]
        if (seconds := self._order.seconds(now)) is not None:
            due.append(seconds)
        for name, model in self._models.items():
            since = self._order.rests_since(name)
            if since is not None and model.source.sleep_seconds >= 0:
                due.append(since + model.source.sleep_seconds - now)
        return max(min(due), 0.0) if due else None

    def _load(self, model: ServedModel) -> None:
        began, source = self._clock(), model.source
        self._set(model, "loading")
        try:
            if model.service is None:
                service = source.loader.load(self._progress(model))
                model.watcher = self._watch(service)
                if self._closing.is_set():
                    service.worker.close(unload=False)
                    return
                model.service = service
            else:
                model.service.worker.load().result()
        except Exception as error:
            if model.service is None or source.loader.is_current():
                return self._failed(model, error)
            # Its vocabulary and snapshots are those of the old files. Its requests wait for it to be loaded anew.
            log.info("%s has other files", model.name)
            with self._changed:
                self._models[model.name] = ServedModel(source, used=model.used)
                self._set(self._models[model.name], "unloaded")
            _close(model)
            return collect_all()
        now = self._clock()
        model.load_seconds, model.error, left = now - began, None, self._left
        self._left = {}
        n_kept = model.service.admin.n_kept().result()
        with self._changed:
            self._order.loaded(model.name, now, keeps=source.keeps)
            self._set(model, "loaded")
            self._admit()
        text = "switched to %s in %.1f s (weights %.1f s, %d conversations kept)"
        seconds = now - min([began, *left.values()])
        log.info(text if left else text.replace("switched to", "loaded"), model.name, seconds, now - began, n_kept)

    def _unload(self, model: ServedModel, status: Status, *, for_another: bool = False) -> None:
        began = self._clock()
        with self._changed:
            if self._order.n_running(model.name):
                return  # a request came after all
            self._order.shut(model.name)
        assert model.service is not None
        try:
            model.service.worker.unload().result()
        except Exception as error:
            self._fail(EngineError(f"cannot unload {model.name}: {error}"))
            return
        with self._changed:
            self._order.unloaded(model.name)
            model.unload_at = None
            self._set(model, status)
        if for_another:
            self._left[model.name] = began
        log.info("%s unloaded in %.1f s", model.name, self._clock() - began)

    def _failed(self, model: ServedModel, error: Exception) -> None:
        """Tell all that wait for ``model``, and load again what left for it."""
        known = error if isinstance(error, PyctlError) else ModelError(f"cannot load {model.name}: internal error")
        if known is not error:
            log.error("cannot load %s", model.name, exc_info=error)
        else:
            log.error("cannot load %s: %s", model.name, error)
        with self._changed:
            model.error, model.failed_at = known, self._clock()
            self._set(model, "unloaded")
            self._refuse(model.name, known)
        left, self._left = self._left, {}
        for name in left:
            if name in self._models and not self._order.is_loaded(name):
                self._load(self._models[name])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let requests run whose models are loaded."""
        for ticket in self._order.admitted():
            future, model = self._futures.pop(ticket, None), self._models[ticket.name]
            if future is None or not future.set_running_or_notify_cancel():
                self._order.end(ticket, self._clock())
                continue
            assert model.service is not None
            model.used = time.time()
            future.set_result(Lease(model.service, partial(self._end, ticket)))

    def _end(self, ticket: Ticket) -> None:
        with self._changed:
            self._order.end(ticket, self._clock())
            self._wake()

    def _given_up(self, ticket: Ticket) -> None:
        with self._changed:
            self._futures.pop(ticket, None)
            self._order.give_up(ticket)
            self._wake()

    def _wake(self) -> None:
        """Have the thread look again, also if it is just looking."""
        self._is_stale = True
        self._changed.notify_all()

    def _let_go(self, model: ServedModel) -> None:
        """Unload a loaded model after its replies, which end after its stop-timeout."""
        if model.unload_at is None:
            model.unload_at = self._clock() + model.source.stop_seconds
            self._wake()
        self._order.shut(model.name)

    def _refuse(self, name: str, error: PyctlError) -> None:
        for ticket in self._order.refuse(name):
            if (future := self._futures.pop(ticket, None)) is not None and future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _take_futures(self) -> list[Future[Lease]]:
        found = [future for future in self._futures.values() if future.set_running_or_notify_cancel()]
        self._futures.clear()
        return found

    def _progress(self, model: ServedModel) -> Progress:
        last = 0.0

        def report(fraction: float) -> bool:
            nonlocal last
            if fraction - last >= PROGRESS_STEP:
                last = fraction
                stage = {"stages": ["text_model"], "current": "text_model", "value": fraction}
                self._tell(
                    {"model": model.name, "event": "model_status", "data": {"status": "loading", "progress": stage}}
                )
            return not self._closing.is_set()

        return report

    def _set(self, model: ServedModel, status: Status) -> None:
        model.status = status
        self._tell({"model": model.name, "event": "model_status", "data": {"status": status}})

    def _tell(self, event: Mapping[str, Any] | None) -> None:
        for listener in tuple(self._listeners):
            with suppress(Exception):
                listener(event)

    def _watch(self, service: Service) -> threading.Thread:
        """End the process if the engine of ``service`` ends."""

        def watch() -> None:
            try:
                service.worker.watch()
            except PyctlError as error:
                self._fail(error)

        thread = threading.Thread(target=watch, name="pyctl-watch", daemon=True)
        thread.start()
        return thread

    def _fail(self, error: PyctlError) -> None:
        with self._changed:
            self._trouble = self._trouble or error
            self._closing.set()
            self._wake()


def _close(model: ServedModel) -> None:
    """End the engine of a model that is not loaded, and its cache."""
    if model.service is not None:
        model.service.worker.close()
    if model.watcher is not None:
        model.watcher.join()


def _by_name(models: Iterable[ServedModel]) -> dict[str, str]:
    """The names of models by their names and aliases. Raises ConfigError if two have the same."""
    names: dict[str, str] = {}
    for model in models:
        for name in dict.fromkeys((model.name, *model.source.card.aliases)):
            if name in names:
                raise ConfigError(f"two models are called {name!r}: {names[name]} and {model.name}")
            names[name] = model.name
    return names


def give_back_lease(future: Future[Lease]) -> None:
    """Wait no longer for what `Models.ask` returned; a lease that has come already is closed."""
    if not future.cancel():
        future.add_done_callback(_close_at_once)


def _close_at_once(future: Future[Lease]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()
