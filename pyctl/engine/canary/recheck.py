"""The evaluation of the end of a snapshot again, from a position before it, and the differences."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import msgspec

from pyctl.cache.ports import SequenceMemory, SnapshotSource
from pyctl.cache.reads import Reads
from pyctl.cache.snapshot import Block, State
from pyctl.engine.backend import Backend
from pyctl.engine.jobs import StateReads

__all__ = ["BatchRange", "CheckSteps", "Measurement", "Recheck", "RecheckPlan"]

DIGEST_BYTES = 16

CheckSteps: TypeAlias = Generator[Reads | None, None, None]
"""Yields None where a request may interrupt, and reads that it waits for."""


class BatchRange(NamedTuple):
    """Tokens [first, last) that are evaluated together."""

    first: int
    last: int


class RecheckPlan(msgspec.Struct, frozen=True):
    """The position to resume at, and the batches to evaluate.

    Attributes:
        start: The position to resume at, 0 for an empty sequence.
        before: The state at ``start``, None where rows are enough.
        ends: The ends of the batches after ``start``. The last is the snapshot's, or before that
            where rows are enough.
    """

    start: int
    before: State | None
    ends: tuple[int, ...]

    @property
    def batches(self) -> list[BatchRange]:
        """The batches, ascending."""
        return [BatchRange(first, last) for first, last in pairwise((self.start, *self.ends))]


class Measurement(msgspec.Struct, frozen=True):
    """Digests of a snapshot's end as it was restored, and as it was evaluated again.

    Attributes:
        restored: A digest of the rows of each batch, then of the state.
        evaluated: The same of the evaluation.
    """

    restored: tuple[bytes, ...]
    evaluated: tuple[bytes, ...]

    @property
    def is_equal(self) -> bool:
        """True if all bits are equal."""
        return self.restored == self.evaluated

    def first_difference(self) -> int:
        """Return the index of the first digest that differs; the state's is the last."""
        pairs = zip(self.restored, self.evaluated, strict=True)
        return next(i for i, (one, other) in enumerate(pairs) if one != other)


class Recheck:
    """The measurement of the snapshot of ``source`` in sequence ``seq``, which is empty, and has
    all cells.

    Rows are compared as the memory saves them, both times out of the same sequence. So a wrong bit
    in the saved bytes, on the way to the device and on the way back is found.
    """

    def __init__(
        self,
        backend: Backend,
        state_reads: StateReads,
        seq: int,
        source: SnapshotSource,
        plan: RecheckPlan,
    ) -> None:
        self._backend = backend
        self._memory: SequenceMemory = backend.memory
        self._state_reads = state_reads
        self._seq = seq
        self._source = source
        self._plan = plan
        self._tokens = source.snapshot.last_tokens(source.snapshot.n)

    def measure(self) -> Generator[Reads | None, None, Measurement]:
        """Restore the snapshot, note its end, evaluate that again, and note it once more.

        Raises PreemptedError for a request, OutOfCellsError without room, DamagedError, StateError
        and OSError of the source. The sequence is undefined then.
        """
        yield from self._restore()
        restored = self._digests()
        self._rewind()
        for batch in self._plan.batches:
            yield None
            self._evaluate(batch)
        return Measurement(restored, self._digests())

    def _restore(self) -> CheckSteps:
        """Load the rows up to the end of the plan, one segment in a step, and the state there."""
        snapshot = self._source.snapshot
        end = self._plan.ends[-1]
        self._memory.clear(self._seq)
        n = 0
        for segment, stop in reversed(snapshot.chain.items()):
            last = min(stop, end)
            rows = yield from self._source.rows(segment)
            self._memory.restore(self._seq, n, [(rows, n, last)])
            n = last
            yield None
            if n == end:
                break
        if end == snapshot.n:
            state = yield from self._source.state()
            self._memory.restore(self._seq, n, (), state)

    def _rewind(self) -> None:
        """Return the sequence to the start of the plan."""
        start = self._plan.start
        before = self._plan.before
        if start == 0 or not self._memory.shape.has_rows:
            self._memory.clear(self._seq)
        else:
            self._memory.rewind(self._seq, start)
        if before is not None:
            self._memory.restore(self._seq, start, (), before)

    def _evaluate(self, batch: BatchRange) -> None:
        """Evaluate ``batch`` as `Prefill` does, unless a request preempts it."""
        control = self._backend.control
        tokens = self._tokens[batch.first : batch.last]
        control.allow_preemption(True)
        try:
            with self._state_reads.allowed():
                self._backend.evaluate(self._seq, tokens, batch.first, output=False)
        finally:
            control.allow_preemption(False)

    def _digests(self) -> tuple[bytes, ...]:
        """Return digests of the sequence's contents: of the rows of each batch, and of the
        state.
        """
        n = self._plan.ends[-1]
        digests = [self._rows_digest(batch) for batch in self._plan.batches]
        state = self._memory.save_state(self._seq, n)
        self._memory.synchronize()
        return (*digests, _digest(state.recurrent))

    def _rows_digest(self, batch: BatchRange) -> bytes:
        """Return the digest of the rows of ``batch``; one batch at a time is in RAM."""
        rows = self._memory.save_rows(self._seq, batch.first, batch.last)
        self._memory.synchronize()
        return _digest(rows.block)


def _digest(block: Block) -> bytes:
    return hashlib.blake2b(block.data, digest_size=DIGEST_BYTES).digest()
