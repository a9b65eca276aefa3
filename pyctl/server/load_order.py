"""The choice of the model to load next and of the model to unload for it, only from requests and
times.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from pyctl.settings.limit import limit

__all__ = ["MAX_HELD_SECONDS", "LoadOrder", "LoadRequest"]

MAX_HELD_SECONDS = limit(
    20.0,
    "waiting for a model while requests keep the loaded ones busy",
    "new requests for one of these wait until it has left",
    "process",
    "s",
)


@dataclass(eq=False)
class LoadRequest:
    """A request for the model ``name``; ``since`` is when, in seconds of the caller's clock."""

    name: str
    since: float


@dataclass
class _Loaded:
    keeps: bool
    idle_since: float
    n_running: int = 0


class LoadOrder:
    """The order of requests for models, of which at most ``maximum`` are loaded at the same time
    (0: no limit).

    The model of the request that waits longest is loaded next. If it needs room, a loaded model
    leaves that serves no request, has served none for ``patience`` seconds, and was used least
    recently; none that is kept. So requests that follow each other on one model pass those for
    others, but only for MAX_HELD_SECONDS: from then on patience does not count, and one busy model
    takes no more requests until it has left. Knows no clock: callers pass the time.
    """

    def __init__(self, maximum: int, patience: float) -> None:
        self.maximum = maximum
        self.patience = patience
        self._waiting: list[LoadRequest] = []  # by arrival
        self._loaded: dict[str, _Loaded] = {}
        self._closed: set[str] = set()
        self._leaving = ""

    # -- requests
    # ----------------------------------------------------------------------------------

    def enqueue(self, ticket: LoadRequest) -> None:
        """Queue a request; `admitted` lists it when it may run."""
        self._waiting.append(ticket)

    def admitted(self) -> list[LoadRequest]:
        """Return the requests that may run now; each has to `end`."""
        if self.next_model is None:
            self._leaving = ""
        admitted_tickets = [
            each for each in self._waiting if each.name in self._loaded and self._is_open(each.name)
        ]
        for ticket in admitted_tickets:
            self._waiting.remove(ticket)
            self._loaded[ticket.name].n_running += 1
        return admitted_tickets

    def end(self, ticket: LoadRequest, now: float) -> None:
        """End a request that ran, at ``now`` seconds of the caller's clock."""
        if (model := self._loaded.get(ticket.name)) is not None:
            model.n_running -= 1
            model.idle_since = now

    def abandon(self, ticket: LoadRequest) -> None:
        """Forget a request, if it waits."""
        with suppress(ValueError):
            self._waiting.remove(ticket)

    def remove_waiting(self, name: str) -> list[LoadRequest]:
        """Remove and return all requests that wait for the model."""
        refused = [ticket for ticket in self._waiting if ticket.name == name]
        self._waiting = [ticket for ticket in self._waiting if ticket.name != name]
        return refused

    # -- models
    # ----------------------------------------------------------------------------------

    def loaded(self, name: str, now: float, *, keeps: bool = False) -> None:
        """Note that the model is loaded, at ``now`` on the caller's clock; with ``keeps`` it is
        never evicted for another.
        """
        self._loaded[name] = _Loaded(keeps, now)

    def unloaded(self, name: str) -> None:
        """Note that the model was unloaded."""
        self._loaded.pop(name, None)
        self._closed.discard(name)
        self._leaving = "" if self._leaving == name else self._leaving

    def stop_admitting(self, name: str) -> None:
        """Let no more requests of a loaded model run: it is about to be unloaded."""
        if name in self._loaded:
            self._closed.add(name)

    def is_loaded(self, name: str) -> bool:
        """Return whether the model is loaded."""
        return name in self._loaded

    def n_running(self, name: str) -> int:
        """Return the number of running requests of the model."""
        return self._loaded[name].n_running if name in self._loaded else 0

    def idle_since(self, name: str) -> float | None:
        """Return the time at which a loaded model's last request ended; None while one runs."""
        model = self._loaded.get(name)
        return model.idle_since if model is not None and not model.n_running else None

    # -- decisions
    # ----------------------------------------------------------------------------------

    @property
    def next_model(self) -> str | None:
        """The model to load: the one that the oldest request for an unloaded model needs."""
        return next(
            (ticket.name for ticket in self._waiting if ticket.name not in self._loaded), None
        )

    @property
    def is_empty(self) -> bool:
        """True if no model is loaded."""
        return not self._loaded

    @property
    def is_full(self) -> bool:
        """True if another model may be loaded only after one was unloaded."""
        return 0 < self.maximum <= len(self._loaded)

    @property
    def all_pinned(self) -> bool:
        """True if all loaded models are kept, so that none can be evicted."""
        return bool(self._loaded) and all(model.keeps for model in self._loaded.values())

    def victim(self, now: float) -> str | None:
        """Return the model to unload now for `next_model`; None if none may be yet, see
        `seconds`.
        """
        movable = {name: model for name, model in self._loaded.items() if not model.keeps}
        if not movable or (held := self._seconds_waited(now)) is None:
            return None
        is_late = held >= MAX_HELD_SECONDS
        resting = [name for name, model in movable.items() if not model.n_running]
        rested = [
            name for name in resting if is_late or now - movable[name].idle_since >= self.patience
        ]
        if rested:
            return min(rested, key=lambda name: movable[name].idle_since)
        if is_late and not self._leaving:
            self._leaving = min(
                movable, key=lambda name: (movable[name].n_running, movable[name].idle_since)
            )
        return None

    def seconds(self, now: float) -> float | None:
        """Return the seconds until `victim` may answer otherwise without any event; None if it
        never does.
        """
        if (held := self._seconds_waited(now)) is None:
            return None
        resting = [model for model in self._loaded.values() if not (model.keeps or model.n_running)]
        due = [model.idle_since + self.patience - now for model in resting]
        due += [MAX_HELD_SECONDS - held] if held < MAX_HELD_SECONDS else []
        return max(min(due), 0.0) if due else None

    def _seconds_waited(self, now: float) -> float | None:
        """Return the seconds that the request for `next_model` has waited."""
        since = (ticket.since for ticket in self._waiting if ticket.name not in self._loaded)
        first = next(since, None)
        return now - first if first is not None else None

    def _is_open(self, name: str) -> bool:
        return name not in self._closed and name != self._leaving
