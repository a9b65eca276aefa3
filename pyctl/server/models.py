"""The models of a process: one that is there from the start, or several that are loaded when a
request names them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from pyctl.engine.engine_settings import Clock
from pyctl.errors import BusyError, ConfigError, PyctlError, RequestError, UnavailableError
from pyctl.server.app_state import AppState, HttpService
from pyctl.server.load_order import LoadOrder, LoadRequest
from pyctl.server.model_card import ModelCard
from pyctl.settings.limit import limit

__all__ = [
    "Lease",
    "ModelSource",
    "Models",
    "Progress",
    "ServedModel",
    "Status",
    "cancel_lease",
]

RETRY_SECONDS = limit(
    10.0,
    "after a model failed to load",
    "requests for it get the same error, and nothing else leaves",
    "process",
    "s",
)

_MAX_LISTENERS = limit(64, "clients of /models/sse", "503 with Retry-After", "process")

MAX_HELD = limit(
    1024, "requests that wait for one of several models", "503 with Retry-After", "process"
)

Status: TypeAlias = Literal["unloaded", "loading", "loaded", "sleeping"]

Progress: TypeAlias = Callable[[float], bool]

Listener: TypeAlias = Callable[[Mapping[str, Any] | None], None]
"""Gets events of models, and None at the end of the process."""


class ServiceLoader(Protocol):
    """The loader of one model's service; the thread that loads models calls it."""

    def load(self, report: Progress) -> HttpService:
        """Return a new service; ``report`` gets fractions and returns whether to continue."""

    def is_current(self) -> bool:
        """Return whether the model's files are still those that `load` read last, as far as their
        metadata shows. Blocks on files.
        """

    def fits(self) -> bool:
        """Return whether the model has room next to those that are loaded. Raises ModelError if it
        cannot be loaded.
        """


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded. Two are equal if one behaves as the other: ``settings`` are all
    that it has, of which the card leaves secrets out.

    With ``keeps`` it is unloaded for no other. After ``sleep_seconds`` without a request it is
    unloaded (< 0: never); an unload that a client requests waits ``stop_seconds`` for replies.
    """

    card: ModelCard
    loader: ServiceLoader = field(compare=False)
    on_start: bool = False
    keeps: bool = False
    stop_seconds: float = 10.0
    sleep_seconds: float = -1.0
    settings: object = None


@dataclass(eq=False)
class ServedModel:
    """A model with its state; ``service`` stays from the first load on, with the cache. ``used``
    is a UNIX time. An ``is_outdated`` one has other files than those that were loaded.
    """

    source: ModelSource
    service: HttpService | None = None
    status: Status = "unloaded"
    error: PyctlError | None = None
    failed_at: float = 0.0
    used: float = 0.0
    load_seconds: float = 0.0
    unload_at: float | None = None
    is_outdated: bool = False

    @property
    def name(self) -> str:
        """Its name for clients."""
        return self.source.card.name


class Lease(msgspec.Struct, frozen=True):
    """A loaded model, which stays loaded until `close`."""

    service: HttpService
    close: Callable[[], None]


class Models:
    """The models of a process, by name and alias, and the requests that wait for one. Thread-safe.

    A `Supervisor` loads and unloads them. An unloaded model keeps its engine, its vocabulary and
    its cache.
    """

    def __init__(
        self,
        shared: AppState,
        find: Callable[[], Iterable[ModelSource]] = tuple,
        order: LoadOrder | None = None,
        *,
        autoload: bool = True,
        clock: Clock = time.monotonic,
    ) -> None:
        """Find the models. None is loaded yet."""
        self.shared = shared
        self.autoload = autoload
        self.only: HttpService | None = None
        """The one model of a process that serves no other."""
        self.order = order or LoadOrder(0, 0.0)
        self.clock = clock
        self._find = find
        self._models = {source.card.name: ServedModel(source) for source in find()}
        self._names = _by_name(self._models.values())
        self._wanted = {name: model.source for name, model in self._models.items()}
        self._reading = threading.Lock()  # held while `reload` looks for models
        self._reloads: list[Future[None]] = []
        self.changed = threading.Event()  # set when the supervisor has to look again
        self.closing = threading.Event()
        self.lock = threading.RLock()  # guards the members below, the order and states of models
        self.futures: dict[LoadRequest, Future[Lease]] = {}
        self._listeners: list[Listener] = []
        self._trouble: PyctlError | None = None

    @classmethod
    def from_service(cls, service: HttpService) -> Models:
        """Return the models of a process with one, which is loaded."""
        models = cls(service.shared)
        models.only = service
        return models

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(tuple(self._models.values()))

    @property
    def supports_images(self) -> bool:
        """True if a model has a vision encoder."""
        return (
            self.only.info.vision
            if self.only
            else any(model.source.card.vision for model in self._models.values())
        )

    @property
    def trouble(self) -> PyctlError | None:
        """The error that ended the service of all, None while it runs."""
        return self.only.worker.trouble if self.only is not None else self._trouble

    @property
    def last_used(self) -> ServedModel | None:
        """The model that served a request last, of those that have been loaded."""
        with_service = [model for model in self._models.values() if model.service is not None]
        return max(with_service, key=lambda model: model.used, default=None)

    @property
    def services(self) -> list[HttpService]:
        """The models that have been loaded, in memory or not."""
        if self.only is not None:
            return [self.only]
        return [model.service for model in self._models.values() if model.service is not None]

    def find(self, name: str) -> ServedModel | None:
        """Return the model called ``name``, or with that alias; Ollama's clients add a tag."""
        own_name = self._names.get(name) or self._names.get(name.removesuffix(":latest"), "")
        return self._models.get(own_name)

    def get(self, name: str) -> ServedModel:
        """Return the model called ``name``. Raises RequestError in llama-server's words."""
        if not name:
            raise RequestError("model name is missing from the request")
        if (model := self.find(name)) is None:
            raise RequestError(f"model '{name}' not found")
        return model

    # -- requests
    # ----------------------------------------------------------------------------------

    def acquire(self, model: ServedModel) -> Future[Lease]:
        """Return a future of the model for one request, which is loaded if need be. Cancel the
        future to stop waiting.

        The future raises ModelError if the model cannot be loaded, and UnavailableError at the end
        of the process.
        """
        future: Future[Lease] = Future()
        ticket = LoadRequest(model.name, self.clock())
        with self.lock:
            if self.closing.is_set():
                future.set_exception(UnavailableError("the server is shutting down"))
                return future
            if (current := self._models.get(model.name)) is None:
                future.set_exception(
                    RequestError(f"model '{model.name}' not found")
                )  # a reload has removed it
                return future
            model = current
            if len(self.futures) >= MAX_HELD:
                future.set_exception(BusyError(len(self.futures)))
                return future
            if model.error is not None and self.clock() - model.failed_at < RETRY_SECONDS:
                future.set_exception(model.error)
                return future
            self.futures[ticket] = future
            self.order.enqueue(ticket)
            self.admit()
            self.changed.set()
        future.add_done_callback(lambda done: self._abandon(ticket) if done.cancelled() else None)
        return future

    def load(self, model: ServedModel) -> None:
        """Load the model soon. Raises RequestError if it is loaded or being loaded."""
        with self.lock:
            if model.status in ("loaded", "loading"):
                raise RequestError("model is already running")
            model.error = None
            model.failed_at = 0.0
        self.acquire(model).add_done_callback(_close_at_once)

    def unload(self, model: ServedModel) -> None:
        """Unload the model after its replies, or when these take too long. RequestError if it is
        not loaded.
        """
        with self.lock:
            if self._models.get(model.name) is not model:
                raise RequestError("model is not running")  # replaced meanwhile
            if model.status == "sleeping":
                return self.set_status(model, "unloaded")
            if not self.order.is_loaded(model.name):
                raise RequestError("model is not running")
            self._let_go(model)

    def reload(self) -> Future[None]:
        """Read again which models there are; return a future that ends when they are in use. Blocks
        on files.

        A model that is gone or has other settings or files is unloaded first, as by `unload`, and
        its snapshots in RAM are dropped; others stay. Raises ConfigError as at the start,
        UnavailableError at shutdown, and changes nothing then.
        """
        done: Future[None] = Future()
        with self._reading:
            sources = {source.card.name: source for source in self._find()}
            _by_name(map(ServedModel, sources.values()))
            outdated = [
                model
                for model in self
                if model.service is not None and not model.source.loader.is_current()
            ]
            with self.lock:
                self._wanted = sources
                for model in outdated:
                    model.is_outdated = True
                if self.closing.is_set():
                    raise UnavailableError("the server is shutting down")
                self._reloads.append(done)
                self.changed.set()
        return done

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with each event, on any thread; return a function that ends that.
        Raises BusyError.
        """
        with self.lock:
            if len(self._listeners) >= _MAX_LISTENERS:
                raise BusyError(len(self._listeners))
            self._listeners.append(listener)

        def end() -> None:
            with self.lock, suppress(ValueError):
                self._listeners.remove(listener)

        return end

    def close(self) -> bool:
        """End all requests and all engines; return whether everything that was to be kept is
        written. Idempotent.
        """
        with self.lock:
            self.closing.set()
            self._emit(None)
            ending: list[Future[Any]] = [*self._reloads]
            ending += [
                future for future in self.futures.values() if future.set_running_or_notify_cancel()
            ]
            for future in ending:
                future.set_exception(UnavailableError("the server is shutting down"))
            self.futures = {}
            self._reloads = []
            self.changed.set()
        services = self.services
        with ThreadPoolExecutor(len(services) or 1, "pyctl-stop") as threads:
            return all(list(threads.map(lambda each: each.worker.close(unload=False), services)))

    # -- the supervisor
    # ----------------------------------------------------------------------------------

    @property
    def is_reloading(self) -> bool:
        """True if a reload waits for `adopt`. A request may then wait for a model that the reload
        replaces.
        """
        return bool(self._reloads)

    def admit(self) -> None:
        """Let the requests run whose models are loaded."""
        with self.lock:
            for ticket in self.order.admitted():
                future = self.futures.pop(ticket, None)
                model = self._models[ticket.name]
                if future is None or not future.set_running_or_notify_cancel():
                    self.order.end(ticket, self.clock())
                    continue
                assert model.service is not None
                model.used = time.time()
                future.set_result(Lease(model.service, partial(self._end, ticket)))

    def fail_waiting(self, name: str, error: PyctlError) -> None:
        """Answer all that wait for the model with ``error``."""
        with self.lock:
            for ticket in self.order.remove_waiting(name):
                future = self.futures.pop(ticket, None)
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_exception(error)

    def adopt(self) -> tuple[list[ServedModel], list[Future[None]]] | None:
        """Adopt the models that reloads found, and return their futures; None until the models that
        they replace are unloaded.

        Returns also the models that are gone, whose engines the caller has to close.
        """
        with self.lock:
            outdated = [
                model
                for name, model in self._models.items()
                if model.is_outdated or self._wanted.get(name) != model.source
            ]
            loaded = [model for model in outdated if self.order.is_loaded(model.name)]
            for model in loaded:
                self._let_go(model)
            if loaded:
                return None
            unchanged = {
                name: model for name, model in self._models.items() if model not in outdated
            }
            self._models = {
                name: unchanged.get(name) or ServedModel(self._wanted[name])
                for name in self._wanted
            }
            self._names = _by_name(self._models.values())
            for model in outdated:
                if model.name not in self._models:
                    self.fail_waiting(model.name, RequestError(f"model '{model.name}' not found"))
            done = self._reloads
            self._reloads = []
            self._emit({"model": "*", "event": "models_reload"})
            return outdated, done

    def renew(self, model: ServedModel) -> None:
        """Have ``model`` loaded again for those that wait for it, since its files have changed."""
        with self.lock:
            self._models[model.name] = ServedModel(model.source, used=model.used)
            self.set_status(self._models[model.name], "unloaded")

    def set_status(self, model: ServedModel, status: Status, **more: object) -> None:
        """Set the state of ``model`` and notify listeners; ``more`` about it is only for them."""
        model.status = status
        self._emit(
            {"model": model.name, "event": "model_status", "data": {"status": status, **more}}
        )

    def fail(self, error: PyctlError) -> None:
        """Stop serving: ``error`` ended one engine, and a device that failed can serve no other."""
        with self.lock:
            self._trouble = self._trouble or error
            self.closing.set()
            self.changed.set()

    # -- inside
    # ----------------------------------------------------------------------------------

    def _emit(self, event: Mapping[str, Any] | None) -> None:
        for listener in tuple(self._listeners):
            with suppress(Exception):
                listener(event)

    def _end(self, ticket: LoadRequest) -> None:
        with self.lock:
            self.order.end(ticket, self.clock())
            self.changed.set()

    def _abandon(self, ticket: LoadRequest) -> None:
        with self.lock:
            self.futures.pop(ticket, None)
            self.order.abandon(ticket)
            self.changed.set()

    def _let_go(self, model: ServedModel) -> None:
        """Unload a loaded model after its replies, which end after its stop-timeout."""
        if model.unload_at is None:
            model.unload_at = self.clock() + model.source.stop_seconds
            self.changed.set()
        self.order.stop_admitting(model.name)


def _by_name(models: Iterable[ServedModel]) -> dict[str, str]:
    """Return the names of models by their names and aliases. Raises ConfigError if two have the
    same.
    """
    names: dict[str, str] = {}
    for model in models:
        for name in dict.fromkeys((model.name, *model.source.card.aliases)):
            if name in names:
                raise ConfigError(f"two models are called {name!r}: {names[name]} and {model.name}")
            names[name] = model.name
    return names


def cancel_lease(future: Future[Lease]) -> None:
    """Stop waiting for the result of `Models.acquire`; close a lease that has arrived already."""
    if not future.cancel():
        future.add_done_callback(_close_at_once)


def _close_at_once(future: Future[Lease]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()
