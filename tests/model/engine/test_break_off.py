"""A client's request interrupts a background request's batch; the sequence returns to its state
before the batch.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Request
from pyctl.engine.worker import Worker
from pyctl.errors import PreemptedError
from pyctl.llama.library.bindings import api
from pyctl.llama.library.native import Pulse
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ask, cold, collect, request, run_all
from tests.unit.server.fake import INFO

N = 64
"""Tokens of a batch."""


def prompt_of(n: int, *, n_ids: int = 60) -> Prompt:
    return Prompt.from_ids(np.random.default_rng(3).integers(1, n_ids, n), [40])


def prewarm(engine: Engine, prompt: Prompt) -> RequestHandle:
    handle = RequestHandle(Request(prompt, max_tokens=0, background=True))
    engine.submit(handle)
    return handle


@pytest.mark.parametrize("kind", ["hybrid", "attention", "opaque"])
def test_a_batch_that_is_broken_off_is_evaluated_later(kind: str) -> None:
    """A background batch that is broken off leaves the sequence where it was, and the next step
    evaluates it again: preemption delays the prompt and changes no token. An opaque state cannot go
    back, so it finishes its batch.
    """
    backend = FakeBackend(kind)
    prompt = prompt_of(500)  # type: ignore[arg-type]
    expected = cold(FakeBackend(kind), prompt, 5).tokens  # type: ignore[arg-type]
    engine = Engine(backend, RamCache(0, None), EngineSettings(exact=True))
    handle, (seq,) = prewarm(engine, prompt), engine.sequences
    for _ in range(3):
        before = seq.n
        backend.control.preempt()
        engine.step()
        if kind == "opaque":  # it has nothing to go back to but what takes as long
            assert seq.n == before + (N if before else 40)
        else:
            assert seq.n == before
            assert not backend.is_preempt_wanted
            assert engine.step()
            assert seq.n > before
    other = ask(engine, Prompt.from_ids(np.full(30, 7)), 3)
    assert other.error is None
    run_all(engine)
    assert collect(handle).done is not None
    reply = ask(engine, prompt, 5)
    assert reply.tokens == expected
    assert reply.done is not None
    assert reply.done.stats.n_evaluated <= N
    check_invariants(engine.prefix_cache.cache)


def test_what_somebody_waits_for_is_not_broken_off() -> None:
    backend = FakeBackend()
    prompt = prompt_of(300)
    engine = Engine(backend, RamCache(0, None), EngineSettings())
    handle = RequestHandle(request(prompt, 3))
    engine.submit(handle)
    while not handle.is_over:
        backend.control.preempt()
        engine.step()
    assert collect(handle).tokens == cold(FakeBackend(), prompt, 3).tokens


class PulseThatBreaks:
    """A `Pulse` by which an evaluation is broken off at the very node that it ``breaks_at``, 0 for
    none.
    """

    is_stopped = is_watching = False
    code = 0

    def __init__(self) -> None:
        self.count = self.breaks_at = 0
        self._is_allowed = False
        self.callback = api.ggml_abort_callback(self._beat)

    def _beat(self, _: object) -> bool:
        self.count += 1
        return self._is_allowed and 0 < self.breaks_at <= self.count

    def allow(self, is_so: bool) -> None:
        self._is_allowed = is_so

    def ask(self, is_wanted: bool) -> None:
        assert not is_wanted
        self.breaks_at = 0


@pytest.mark.parametrize("shape", ["tiny-hybrid", "tiny-dense", "tiny-moe"])
def test_logits_are_those_of_a_cold_run(
    shape: str, open_model: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken off in the middle of its graph."""
    backend = open_model(shape, n_ubatch=N).backend
    assert isinstance(backend, LlamaBackend)
    prompt = prompt_of(400, n_ids=250)

    def last(engine: Engine) -> NDArray[np.float32]:
        assert ask(engine, prompt, 1).error is None
        return backend.logits(0)

    cold(backend, prompt, 1)
    expected = backend.logits(0)
    pulse = PulseThatBreaks()
    real = backend.control.pulse
    ctx = ctypes.cast(backend.ctx, ctypes.c_void_p).value or 0
    monkeypatch.setattr(backend.control, "pulse", pulse)
    api.llama_set_abort_callback(backend.ctx, pulse.callback, None)
    try:
        engine = Engine(backend, RamCache(0, None), EngineSettings(exact=True))
        handle, (seq,) = prewarm(engine, prompt), engine.sequences
        assert engine.step()
        before = seq.n
        assert before > 0
        for part in range(1, 6):
            pulse.breaks_at = pulse.count + backend.control._n_looks * part // 6
            engine.step()
            assert seq.n == before, "it was broken off"
            assert pulse.breaks_at == 0, "and said so"
        run_all(engine)
    finally:
        real.attach(ctx)
        monkeypatch.undo()
    assert collect(handle).done is not None
    assert (last(engine) == expected).all()
    for each in engine.sequences:
        backend.memory.clear(each.id)
    engine.prefix_cache.cache.clear()


@pytest.mark.parametrize("shape", ["tiny-hybrid", "tiny-dense", "tiny-moe"])
def test_a_device_that_asks_nobody_is_looked_at_between_its_layers(
    shape: str, open_model: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that holds everything and takes no callback, such as a GPU, is interrupted between
    its layers; afterwards it goes on as if it had not been.
    """
    backend = open_model(shape, n_ubatch=N, flash_attn="on").backend
    assert isinstance(backend, LlamaBackend)
    prompt = prompt_of(400, n_ids=250)
    before = backend.control.pulse
    pulse = Pulse()
    assert ask(Engine(backend, RamCache(0, None), EngineSettings()), prompt, 1).error is None
    expected = backend.logits(0)
    backend.memory.clear(0)
    assert not before.is_watching, "the CPU asks by itself"
    pulse.watch(ctypes.cast(backend.ctx, ctypes.c_void_p).value or 0)
    monkeypatch.setattr(backend.control, "pulse", pulse)
    monkeypatch.setattr(backend.control, "_n_looks", 0)
    assert backend.control.can_preempt
    engine = Engine(backend, RamCache(0, None), EngineSettings(exact=True))
    handle, (seq,) = prewarm(engine, prompt), engine.sequences
    for _ in range(3):
        held = seq.n
        backend.control.preempt()
        engine.step()
        assert seq.n == held
        backend.control.preempt(False)
        assert engine.step()
        assert seq.n > held
    run_all(engine)
    assert collect(handle).done is not None
    seen = pulse.count
    assert seen >= len(prompt) // N + 3
    reply = ask(engine, prompt, 1)
    assert reply.done is not None
    assert reply.done.stats.n_evaluated <= N
    assert pulse.count == seen, "a client's own evaluation is not stopped"
    assert (backend.logits(0) == expected).all()
    backend.memory.clear(seq.id)
    engine.prefix_cache.cache.clear()


def test_a_request_breaks_off_what_runs(
    open_model: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that arrives during a background evaluation interrupts it exactly once, so that its
    client does not wait for a batch of the background.
    """
    backend = open_model("tiny-hybrid", n_ubatch=N).backend
    backend.evaluate(0, prompt_of(N).tokens, 0)  # as any start does
    backend.memory.clear(0)
    assert backend.control.can_preempt
    heard: list[int] = []
    begun = threading.Event()
    asked = threading.Event()
    real = backend.evaluate

    def evaluate(*args: object, **more: object) -> None:
        begun.set()
        assert asked.wait(60)
        try:
            real(*args, **more)  # type: ignore[arg-type]
        except PreemptedError:
            heard.append(1)
            raise

    monkeypatch.setattr(backend, "evaluate", evaluate)
    worker = Worker(Engine(backend, RamCache(0, None), EngineSettings()), INFO)
    try:
        worker.prewarm(Request(prompt_of(300), max_tokens=0, background=True))
        assert begun.wait(60)
        handle = worker.submit(request(prompt_of(50), 2))
        asked.set()
        assert [type(event) for event in handle][-1] is Done
        assert heard == [1]
    finally:
        asked.set()
        monkeypatch.undo()
        worker.call(lambda: backend.memory.clear(0)).result(60)
        worker.call(lambda: setattr(backend, "unload", lambda: None)).result(60)
        worker.close()
        del backend.unload  # type: ignore[attr-defined]
