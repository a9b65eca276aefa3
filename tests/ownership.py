"""Asserts the thread rule of pyctl.engine: what a worker runs is touched by its thread alone, and
by reads.

A read may touch it only while that thread waits, and then the thread itself calls no more than the
backend.

Installed for every test by tests/conftest.py. It wraps the methods of the classes that have an
owner, so the program itself pays nothing.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

from pyctl.cache.prefix_cache import PrefixCache
from pyctl.cache.ram import RamCache
from pyctl.cache.sequence import LiveSequence
from pyctl.engine.canary.canary import Canary
from pyctl.engine.engine import Engine
from pyctl.engine.jobs import StateReads
from pyctl.engine.worker import Worker
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.memory.context_cells import ContextCells
from pyctl.llama.memory.context_memory import ContextMemory
from tests.fake import FakeBackend
from tests.fake.fake_memory import FakeMemory

OWNED: tuple[type, ...] = (
    Engine,
    PrefixCache,
    RamCache,
    LiveSequence,
    Canary,
    FakeMemory,
    FakeBackend,
    LlamaBackend,
    ContextCells,
    ContextMemory,
)

ANY_THREAD = frozenset({"preempt", "check", "interrupt", "_freed"})
"""Methods that any thread may call; who lets go of a block last frees it."""

READ: tuple[type, ...] = (Engine, PrefixCache, RamCache, LiveSequence, Canary)
"""Classes whose attributes a read may touch while the backend evaluates."""

violations: list[str] = []
"""Accesses by a thread that is not the owner, since the last check."""

_owners: weakref.WeakKeyDictionary[Any, tuple[threading.Thread, StateReads | None]] = (
    weakref.WeakKeyDictionary()
)

_reading = threading.local()


def install() -> None:
    """Watch all objects of the OWNED classes from now on; an object has no owner until a worker
    runs it.
    """
    for owned in OWNED:
        for name, method in list(vars(owned).items()):
            if (
                isinstance(method, FunctionType)
                and not name.startswith("__")
                and name not in ANY_THREAD
            ):
                setattr(owned, name, _watched(owned.__name__, method))
    run = Worker._run
    save_rest = Worker._save_rest
    read = StateReads.run

    @functools.wraps(run)
    def owning(self: Worker) -> None:
        _own(self, self._engine.state_reads)
        try:
            run(self)
        finally:
            for part in _parts(self):
                _owners.pop(part, None)

    @functools.wraps(save_rest)
    def taking_over(self: Worker) -> None:
        _own(
            self, None
        )  # the thread that had it is in a call that never returns, and reads have ended
        save_rest(self)

    @functools.wraps(read)
    def reading(self: StateReads) -> None:
        _reading.by = self
        try:
            read(self)
        finally:
            _reading.by = None

    Worker._run = owning
    Worker._save_rest = taking_over
    StateReads.run = reading  # type: ignore[method-assign]


def _parts(worker: Worker) -> list[Any]:
    engine = worker._engine
    cache = engine.prefix_cache
    backend = engine.backend
    memory = backend.memory
    canary = engine.canary
    return [engine, cache, cache.cache, canary, backend, memory, memory.cells, *engine.sequences]


def _own(worker: Worker, reads: StateReads | None) -> None:
    for part in _parts(worker):
        _owners[part] = threading.current_thread(), reads


def _watched(owner: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        thread, reads = _owners.get(self, (None, None))
        name = threading.current_thread().name
        if reads is not None and getattr(_reading, "by", None) is reads:
            if reads.is_evaluating and not isinstance(self, READ):
                _violated(f"{owner}.{method.__name__} was called by a read while it evaluates")
        elif thread is not None:
            if thread is not threading.current_thread():
                _violated(f"{owner}.{method.__name__} was called by {name}, not {thread.name}")
            if reads is not None and isinstance(self, READ) and not reads._closed.locked():
                _violated(f"{owner}.{method.__name__} was called by {name} while others may read")
        return method(self, *args, **kwargs)

    return checked


def _violated(text: str) -> None:
    violations.append(text)
    raise AssertionError(text)


def check() -> None:
    """Raise AssertionError if anything was touched by a foreign thread since the last call."""
    found = list(violations)
    violations.clear()
    assert not found, "\n".join(found)
