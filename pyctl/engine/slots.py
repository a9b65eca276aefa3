"""The live sequences as clients know them, under llama-server's word: slots."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from pyctl.engine.engine import Engine
from pyctl.engine.job import Errand
from pyctl.engine.live import LiveSeq
from pyctl.engine.views import SlotFile, SlotView
from pyctl.engine.worker import Worker
from pyctl.errors import PyctlError, RequestError, StateError

__all__ = ["SlotAdmin"]

R = TypeVar("R")


class SlotAdmin:
    """Each call is done between two steps of the engine, those that change a sequence once it is idle. Any thread.

    Numbers of sequences wrap around, as in llama-server.
    """

    def __init__(self, worker: Worker, engine: Engine) -> None:
        self._worker, self._engine = worker, engine

    def view(self) -> Future[tuple[SlotView, ...]]:
        """All sequences."""
        return self._worker.call(lambda: tuple(self._view_of(seq) for seq in self._engine.seqs))

    def save(self, seq: int, path: Path) -> Future[SlotFile]:
        """Write a sequence to ``path``; StateError if that fails."""
        return self._when_idle(seq, lambda live: self._save(live, path))

    def restore(self, seq: int, path: Path) -> Future[SlotFile]:
        """Fill a sequence from ``path``; RequestError, and an empty sequence, if that fails."""
        return self._when_idle(seq, lambda live: self._restore(live, path))

    def erase(self, seq: int) -> Future[int]:
        """Empty a sequence; how many tokens it held."""
        return self._when_idle(seq, self._erase)

    def _view_of(self, seq: LiveSeq) -> SlotView:
        job = self._engine.last.get(seq.id)
        if job is None:
            return SlotView(seq.id, seq.capacity, seq.busy)
        request, report = job.ticket.request, job.report
        view = SlotView(seq.id, seq.capacity, seq.busy, job.id, request, seq.n)
        if not seq.busy or report is None:
            return view
        n_prompt = len(request.prompt)
        return SlotView(
            *(seq.id, seq.capacity, True, job.id, request, seq.n),
            n_cached=report.n_cached,
            n_evaluated=min(seq.n, n_prompt) - report.n_cached,
            n_predicted=seq.n - n_prompt + 1 if seq.n >= n_prompt else 0,
            prompt=tuple(seq.tokens[:n_prompt].tolist()),
            reply=tuple(seq.tokens[n_prompt:].tolist()),
        )

    def _save(self, seq: LiveSeq, path: Path) -> SlotFile:
        began = time.perf_counter()
        n_bytes = self._engine.backend.save_file(seq.id, path, seq.tokens, seq.ends)
        return SlotFile(seq.n, n_bytes, (time.perf_counter() - began) * 1e3)

    def _restore(self, seq: LiveSeq, path: Path) -> SlotFile:
        began = time.perf_counter()
        self._engine.keeper.park(seq)
        self._engine.keeper.forget(seq)
        try:
            saved = self._engine.backend.load_file(seq.id, path)
        except StateError as error:
            self._engine.keeper.forget(seq)
            raise RequestError(f"Unable to restore slot: {error}") from error
        seq.reset(saved.tokens, ends=saved.ends)
        return SlotFile(seq.n, saved.n_bytes, (time.perf_counter() - began) * 1e3)

    def _erase(self, seq: LiveSeq) -> int:
        n = seq.n
        self._engine.keeper.forget(seq)
        return n

    def _when_idle(self, seq: int, function: Callable[[LiveSeq], R]) -> Future[R]:
        future: Future[R] = Future()
        live = self._engine.seqs[seq % len(self._engine.seqs)]

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(live))
            except Exception as error:
                future.set_exception(error)

        def fail(error: PyctlError) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        def unless_begun(call: Future[None]) -> None:
            if call.cancelled():
                future.cancel()
            elif isinstance(error := call.exception(), PyctlError):
                fail(error)

        errand = Errand(live.id, run, fail)
        self._worker.call(lambda: self._engine.when_idle(errand), needs_model=True).add_done_callback(unless_begun)
        return future
