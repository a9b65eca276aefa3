"""Inspection and control of the engine and its cache from other threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pyctl.cache.cache_stats import (
    SHOWN,
    CacheView,
    KnownParts,
    LiveView,
    build_cache_view,
)
from pyctl.cache.check import find_inconsistencies
from pyctl.cache.ports import Entry
from pyctl.cache.request_kind import RequestKind
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import BlockBytes, PromptFacts, PromptMatch
from pyctl.engine.canary.canary_counts import CanaryView
from pyctl.engine.engine import Engine
from pyctl.engine.engine_stats import (
    EngineCounters,
    EngineMemory,
    EngineStats,
    SequenceFile,
    SequenceView,
)
from pyctl.engine.request import Failed
from pyctl.engine.request_history import ServedRequest
from pyctl.engine.sequence_file import load_file, save_file
from pyctl.engine.worker import Worker
from pyctl.errors import OutOfCellsError, RequestError, StateError
from pyctl.prompt import Tokens

__all__ = ["EngineAdmin"]

R = TypeVar("R")


class EngineAdmin:
    """Reads and changes the engine's sequences and cache, from any thread. Futures hold the
    results.

    Views show the current moment, also while the model evaluates. Changes happen between two steps
    of the engine, a sequence's once it is idle. Sequence numbers are taken modulo the number of
    sequences, as in llama-server.
    """

    def __init__(self, worker: Worker, engine: Engine) -> None:
        self._worker = worker
        self._engine = engine
        self._last = EngineCounters()
        self._n_changes = 0
        self._seen: list[object] = []
        self._parts = KnownParts()
        self._contents: object = None
        self._stored: tuple[object, list[Entry]] = None, []
        self._revision = time.time_ns() // 10**6  # differs from all revisions before a restart
        no_blocks = BlockBytes(0, 0, 0)
        self._device = 0, no_blocks
        worker.call(self._device_usage, is_read=True)

    # -- the engine
    # ----------------------------------------------------------------------------------

    def stats(self) -> Future[EngineStats]:
        """Return the current counters, without waking a sleeping engine."""
        return self._worker.call(self._stats, is_read=True)

    def memory(self) -> Future[EngineMemory]:
        """Return the engine's memory use apart from the model, without waking a sleeping engine."""

        def run() -> EngineMemory:
            _, blocks = self._device_usage()
            return self._memory(blocks)

        return self._worker.call(run, is_read=True)

    def embed(self, tokens: Tokens) -> Future[NDArray[np.float32]]:
        """Return the embeddings of ``tokens``, shape (1 or n, width); errors as
        `Evaluator.embed`.
        """
        return self._worker.call(lambda: self._embed(tokens), needs_model=True)

    def n_kept(self) -> Future[int]:
        """Return how many conversations have a snapshot in RAM."""

        def run() -> int:
            ends = self._engine.prefix_cache.cache.conversation_ends()
            return len(ends)

        return self._worker.call(run, is_read=True)

    @property
    def n_embed(self) -> int:
        """The number of tokens that `embed` takes."""
        return self._engine.backend.facts.n_embed

    # -- the cache
    # ----------------------------------------------------------------------------------

    def view(self) -> Future[CacheView]:
        """Return the contents of the cache."""
        return self._worker.call(self._view, is_read=True)

    def canary(self) -> Future[CanaryView]:
        """Return the results of the checks of snapshots since the start."""
        return self._worker.call(self._engine.canary.view, is_read=True)

    def n_by_kind(self) -> Future[Mapping[RequestKind, int]]:
        """Return the number of requests since the start, by kind."""
        return self._worker.call(lambda: dict(self._engine.history.n_by_kind), is_read=True)

    def requests(self) -> Future[Sequence[tuple[float, ServedRequest]]]:
        """Return (age in seconds, request) of the latest requests within an hour, oldest first."""
        return self._worker.call(self._engine.history.within_hour, is_read=True)

    def revision(self) -> Future[int]:
        """Return the current `CacheView.revision`, cheaper than `view`."""
        return self._worker.call(self._revise, is_read=True)

    def check(self) -> Future[list[str]]:
        """The contradictions of the cache in RAM, as `find_inconsistencies` lists them; nothing is
        evaluated meanwhile.
        """
        return self._worker.call(
            lambda: find_inconsistencies(self._engine.prefix_cache.cache), is_read=True
        )

    def pin(self, name: str, pinned: bool) -> Future[bool]:
        """Pin or unpin a snapshot by id; False if there is none. RequestError if all pinned exceed
        the RAM cache.
        """

        def run() -> bool:
            self._n_changes += 1
            cache = self._engine.prefix_cache.cache
            if cache.pin(name, pinned):
                return True
            if any(snapshot.prefix.name == name for snapshot in cache.snapshots()):
                raise RequestError(
                    f"{name} does not fit: all pinned prefixes together exceed --cache-ram"
                )
            return False

        return self._worker.call(run)

    def drop(self, name: str) -> bool:
        """Drop a snapshot by id from RAM, the device, the disk and the write queue; False if there
        is none.

        RequestError, before anything goes, if it is pinned. Blocks the caller's thread on the
        engine and the disk.
        """
        disk = self._engine.prefix_cache.disk
        if disk is not None:
            for entry in disk.entries():
                if entry.pinned and entry.name == name:
                    raise RequestError(f"{name} is pinned: unpin it first")
        was_in_memory = self._worker.call(lambda: self._drop(name)).result()
        was_on_disk = False
        if disk is not None:
            was_on_disk = disk.remove(name)
        return was_on_disk or was_in_memory

    def stored(self) -> list[Entry]:
        """Return the entries on disk for this model, last used first. Blocks the caller's thread on
        disk access.

        Hits and ages date from the last time an entry was added or removed.
        """
        disk = self._engine.prefix_cache.disk
        if disk is None:
            return []
        contents, entries = self._stored
        if contents is not disk.contents:
            contents = disk.contents
            entries = disk.entries()
            self._stored = contents, entries
        return entries

    @property
    def n_saved(self) -> int | None:
        """Snapshots that this process wrote to disk, None without one; also after the end."""
        disk = self._engine.prefix_cache.disk
        if disk is None:  # the cache is in memory only
            return None
        return disk.view().written.n

    def clear(self) -> Future[int]:
        """Drop all unpinned snapshots and all draft texts; return the number of snapshots. Live
        sequences stay.
        """

        def run() -> int:
            self._n_changes += 1
            self._engine.speculation.forget()
            self._engine.prewarms.forget()
            return self._engine.prefix_cache.cache.clear()

        return self._worker.call(run)

    # -- the sequences
    # ----------------------------------------------------------------------------------

    def sequences(self, *, with_tokens: bool = False) -> Future[tuple[SequenceView, ...]]:
        """Return views of all sequences, ``with_tokens`` if they are asked for."""

        def run() -> tuple[SequenceView, ...]:
            return tuple(self._sequence(seq, with_tokens) for seq in self._engine.sequences)

        return self._worker.call(run, is_read=True)

    def save(self, seq: int, path: Path) -> Future[SequenceFile]:
        """Write a sequence to ``path``. Raises StateError on failure."""
        return self._when_idle(seq, lambda live: self._save(live, path))

    def restore(self, seq: int, path: Path) -> Future[SequenceFile]:
        """Fill a sequence from ``path``. On failure, raises RequestError and leaves the sequence
        empty.
        """
        return self._when_idle(seq, lambda live: self._restore(live, path))

    def erase(self, seq: int) -> Future[int]:
        """Empty a sequence; return the number of tokens it held."""
        return self._when_idle(seq, self._erase)

    def stop(self, task: int) -> Future[bool]:
        """End the request of this id, whose client gets an error; False if no such request runs."""

        def run() -> bool:
            active = next((running for running in self._engine.running if running.id == task), None)
            if active is None:
                return False
            error = RequestError("the request was stopped from the cache view")
            active.handle.put(Failed(error))
            active.handle.cancel()
            return True

        # At once: between two steps the request may end, and a long batch takes seconds.
        return self._worker.call(run, is_read=True)

    # -- on the engine's thread
    # ----------------------------------------------------------------------------------

    def _view(self) -> CacheView:
        prefix_cache = self._engine.prefix_cache
        view = build_cache_view(
            prefix_cache.cache, prefix_cache.totals, self._parts, prefix_cache.disk
        )
        live = tuple(self._live(seq) for seq in self._engine.sequences)
        return replace(view, live=live, revision=self._revise())

    def _live(self, seq: LiveSequence) -> LiveView:
        """Return the view of one live sequence, with the deepest snapshot of its tokens."""
        snapshots = self._engine.prefix_cache.cache.lookup(PromptMatch(seq.tokens), seq.n)
        snapshot_name = ""
        if snapshots:
            snapshot_name = snapshots[0].prefix.name
        owner = self._engine.scheduler.occupancy.owner(seq)
        task = -1
        if owner is not None:
            task = owner.id
        return LiveView(
            id=seq.id,
            n=seq.n,
            busy=owner is not None,
            at=snapshot_name,
            tail=tuple(seq.tokens[-SHOWN:].tolist()),
            task=task,
        )

    def _is_busy(self, seq: LiveSequence) -> bool:
        return self._engine.scheduler.occupancy.owner(seq) is not None

    def _revise(self) -> int:
        """Increment the revision if anything has changed since the last call."""
        engine = self._engine
        cache = engine.prefix_cache.cache
        disk = engine.prefix_cache.disk
        totals = engine.prefix_cache.totals
        seen: list[object] = [
            self._n_changes,
            cache.turn,
            cache.n_bytes,
            cache.evictor.n_evicted,
            cache.index.pool.n_shed,
            cache.held.n_lost,
            totals.requests,
            totals.n_saved,
            engine.counters.n_calls,
            len(engine.running),
            engine.canary.counts.n_results,
        ]
        for seq in engine.sequences:
            seen.append((seq.n, self._is_busy(seq)))
        contents: object = None
        if disk is not None:
            contents = disk.contents  # a new object after each change
        if seen != self._seen or contents is not self._contents:
            self._seen = seen
            self._contents = contents
            self._revision += 1
        return self._revision

    def _drop(self, name: str) -> bool:
        cache = self._engine.prefix_cache.cache
        for snapshot in cache.snapshots():
            if snapshot.prefix.name == name:
                if snapshot in cache.index.pinned:
                    raise RequestError(f"{name} is pinned: unpin it first")
                self._n_changes += 1
                cache.prompt_ends.drop_descendants(snapshot)
                cache.drop(snapshot)
                return True
        for end in [end for end in cache.prompt_ends if end.prefix.name == name]:
            cache.drop(end)
            return True
        return False

    def _stats(self) -> EngineStats:
        """Return the state of the engine, with counts since the last call."""
        engine = self._engine
        n_held, blocks = self._device_usage()
        total = deepcopy(engine.counters)
        before = self._last
        self._last = total
        names = [counter.name for counter in fields(EngineCounters)]
        counts = [name for name in names if name not in ("drafts", "replies")]
        changes = {name: getattr(total, name) - getattr(before, name) for name in counts}
        recent = EngineCounters(**changes)
        suspended = [active.suspended_snapshot for active in engine.waiting.suspended]
        return EngineStats(
            total=total,
            recent=recent,
            n_processing=len(engine.running),
            n_waiting=len(engine.waiting.queue) + len(suspended),
            n_suspended=len(suspended),
            suspended_bytes=sum(kept.n_bytes for kept in suspended if kept is not None),
            n_cells=engine.cells.n_cells,
            n_cells_used=engine.cells.n_used,
            n_cells_held=n_held,
            device=replace(engine.prefix_cache.device.counts),
            cache=self._view(),
            memory=self._memory(blocks),
        )

    def _embed(self, tokens: Tokens) -> NDArray[np.float32]:
        began = time.perf_counter()
        with self._engine.state_reads.allowed():
            rows = self._engine.backend.embed(tokens)
        ms = (time.perf_counter() - began) * 1e3
        self._engine.counters.count_embedded(int(tokens.size), ms)
        return rows

    def _memory(self, blocks: BlockBytes) -> EngineMemory:
        prefix_cache = self._engine.prefix_cache
        return EngineMemory(
            snapshots=prefix_cache.cache.n_bytes,
            blocks=blocks,
            recent_prompts=prefix_cache.recent.n_bytes,
            draft_texts=self._engine.speculation.n_bytes,
            images=self._engine.backend.image_bytes,
        )

    def _device_usage(self) -> tuple[int, BlockBytes]:
        """Cells of held rows and bytes of blocks; while the backend evaluates, last time's, and the
        next step reads its memory.
        """
        engine = self._engine
        if engine.state_reads.is_evaluating:
            self._worker.call(self._device_usage)
        else:
            n_held = 0
            if not engine.asleep:
                n_held = engine.prefix_cache.device.n_cells
            blocks = engine.backend.memory.block_bytes()
            self._device = n_held, blocks
        return self._device

    def _sequence(self, seq: LiveSequence, with_tokens: bool) -> SequenceView:
        """Return the view of one sequence, and of the request that used it last."""
        active = self._engine.scheduler.occupancy.last.get(seq.id)
        is_busy = self._is_busy(seq)
        if active is None:
            return SequenceView(seq.id, seq.capacity, is_busy)
        request = active.handle.request
        stats = active.stats
        view = SequenceView(
            id=seq.id,
            n_ctx=seq.capacity,
            busy=is_busy,
            task=active.id,
            request=request,
            n_tokens=seq.n,
        )
        if not is_busy or stats is None:
            return view
        n_prompt = len(request.prompt)
        shown: tuple[int, ...] = ()
        if with_tokens:
            shown = tuple(seq.tokens.tolist())
        n_predicted = 0
        if seq.n >= n_prompt:
            n_predicted = seq.n - n_prompt + 1
        return replace(
            view,
            n_cached=stats.n_cached,
            n_evaluated=min(seq.n, n_prompt) - stats.n_cached,
            n_predicted=n_predicted,
            has_new_line=active.handle.has_new_line,
            prompt=shown[:n_prompt],
            reply=shown[n_prompt:],
        )

    def _save(self, seq: LiveSequence, path: Path) -> SequenceFile:
        began = time.perf_counter()
        # Without --exact the engine does not record which batches ran while other sequences had
        # cells.
        is_known = self._engine.settings.exact or len(self._engine.sequences) == 1
        ends: Sequence[int] = ()
        if is_known:
            ends = seq.batch_ends
        n_bytes = save_file(
            memory=self._engine.backend.memory,
            seq=seq,
            ends=ends,
            path=path,
            identity=self._worker.info.fingerprint,
        )
        ms = (time.perf_counter() - began) * 1e3
        return SequenceFile(seq.n, n_bytes, ms)

    def _restore(self, seq: LiveSequence, path: Path) -> SequenceFile:
        """Read a file into ``seq``, which is empty if that fails with RequestError."""
        began = time.perf_counter()
        engine = self._engine
        engine.prefix_cache.park(seq)
        try:
            saved = load_file(path, self._worker.info.fingerprint)
            n = int(saved.tokens.size)
            if n > seq.capacity:
                raise StateError("Restored prompt does not fit in the slot context")
            if n and int(saved.tokens.max()) >= self._worker.info.n_vocab:
                raise StateError("its tokens are not of this model")
            engine.cells.make_room(n)
            engine.backend.memory.restore(seq.id, 0, saved.spans, saved.state)
        except (StateError, OutOfCellsError) as error:
            engine.prefix_cache.forget(seq)
            raise RequestError(f"Unable to restore slot: {error}") from error
        seq.reset(saved.tokens, ends=saved.batch_ends)
        engine.scheduler.mark_shared()
        if seq.shares:
            seq.batch_ends = []  # its rows lie after other sequences'
        disk = engine.prefix_cache.disk
        for_disk = disk is not None and disk.policy.kind != "off"
        seq.facts = PromptFacts(engine.prefix_cache.cache.turn, for_disk=for_disk, n_header=seq.n)
        engine.scheduler.occupancy.named.add(seq.id)
        ms = (time.perf_counter() - began) * 1e3
        return SequenceFile(seq.n, saved.n_bytes, ms)

    def _erase(self, seq: LiveSequence) -> int:
        n = seq.n
        self._engine.prefix_cache.forget(seq)
        return n

    def _when_idle(self, seq: int, function: Callable[[LiveSequence], R]) -> Future[R]:
        number = seq % len(self._engine.sequences)

        def run() -> R:
            live = self._engine.sequences[number]
            return function(live)

        return self._worker.call(run, needs_model=True, seq=number)
