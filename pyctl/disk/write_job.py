"""A snapshot on its way to the disk: its states, the changes between them, and its rows."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeAlias

from pyctl.cache.ports import RowsOf
from pyctl.cache.snapshot import NOTHING, Block, Segment, Snapshot
from pyctl.errors import NotWrittenError

__all__ = ["CHANGES", "JobState", "WriteJob", "Writing", "detached_copy"]

Writing: TypeAlias = Generator[Segment, None, int]
"""A running write: yields the segments whose rows it needs next, and returns the bytes written.

Closing it removes its temp files.
"""


class JobState(Enum):
    """The state of a `WriteJob`. `CHANGES` lists the allowed changes."""

    READY = auto()
    """The rows of its next segment are in RAM: it waits for its turn."""

    NEEDS_ROWS = auto()
    """Only the device has the rows of its next segment: it waits for `WriteQueue.supply_rows`."""

    COPYING = auto()
    """The cache evicted the snapshot: its rows are being copied from the device to RAM."""

    PARKED = auto()
    """The disk refused it, and only the device has its rows: the end of the server tries again."""

    CANCELLED = auto()
    """It was given up after its first turn: the writing thread has yet to remove its temp files."""

    ENDED = auto()
    """It has left the queue, written or given up."""


CHANGES: Mapping[JobState, frozenset[JobState]] = {
    JobState.READY: frozenset(
        {
            JobState.NEEDS_ROWS,  # a turn reached a segment that only the device has
            JobState.COPYING,  # evicted
            JobState.PARKED,  # a turn failed
            JobState.CANCELLED,
            JobState.ENDED,  # written, or given up before its first turn
        }
    ),
    JobState.NEEDS_ROWS: frozenset(
        {
            JobState.READY,  # the rows of the next segment are in RAM
            JobState.COPYING,  # evicted
            JobState.CANCELLED,
        }
    ),
    JobState.COPYING: frozenset(
        {
            JobState.READY,  # all copies are complete
            JobState.CANCELLED,
            JobState.ENDED,  # given up, or its last turn was running when it was evicted
        }
    ),
    JobState.PARKED: frozenset(
        {
            JobState.READY,  # the server ends
            JobState.COPYING,  # evicted: RAM gets the rows, so that no further try costs a copy
            JobState.ENDED,
        }
    ),
    JobState.CANCELLED: frozenset({JobState.ENDED}),
    JobState.ENDED: frozenset(),
}
"""The states that may follow each state."""


@dataclass(eq=False)
class WriteJob:
    """A write of ``snapshot``, one segment in each turn.

    Rows that only the device has come from ``original`` when they are needed. Once the cache has
    evicted it, the job has all rows itself.

    Attributes:
        snapshot: A copy of the snapshot, with new segments that share the bytes.
        original: The snapshot in the cache.
        is_chosen: Whether a policy chose it.
        is_interim: Whether its prompt was still being evaluated, and no policy has chosen it.
        value: The seconds that it saves; among chosen snapshots, later ones have more.
        state: The state of the job; `CHANGES` has the allowed changes.
        n_bytes: The bytes of RAM that the job takes after the eviction, 0 before.
        writing: The running write, from the first turn on.
        next_segment: The segment that the next turn writes.
        error: The reason why the job was cancelled.
    """

    snapshot: Snapshot
    original: weakref.ref[Snapshot]
    is_chosen: bool
    value: float
    state: JobState = JobState.READY
    n_bytes: int = 0
    writing: Writing | None = None
    next_segment: Segment | None = None
    error: Exception | None = None
    is_interim: bool = False

    def change(self, state: JobState) -> None:
        """Change to ``state``, which `CHANGES` has to allow."""
        assert state in CHANGES[self.state], (
            f"a write job cannot change from {self.state.name} to {state.name}"
        )
        self.state = state

    @property
    def is_cancelled(self) -> bool:
        """True if only the removal of its temp files is left to do."""
        return self.state is JobState.CANCELLED

    @property
    def may_publish(self) -> bool:
        """True unless `forbid_publishing` was called."""
        return self.snapshot.facts.for_disk

    @property
    def is_evicted(self) -> bool:
        """True if the cache has evicted the snapshot, so that the job alone has its rows."""
        return self.n_bytes > 0

    @property
    def needs_device_rows(self) -> bool:
        """True if the job needs rows that only the device has, or had."""
        return any(segment.held is not None for segment in self.snapshot.chain)

    @property
    def has_bytes(self) -> bool:
        """True if some RAM would be free without the job."""
        return self.is_evicted or any(segment.rows.size for segment in self.snapshot.chain)

    @property
    def rank(self) -> tuple[bool, bool, bool, float]:
        """The key by which jobs are ordered: the larger, the earlier its turn and the later its
        loss.

        The order is: cancelled, chosen by a policy, in RAM, then by worth, per byte unless a policy
        chose it. Interim snapshots have no worth until they are evicted.
        """
        value = self.value if self.is_chosen else self.value / max(self.n_bytes, 1)
        return self.is_cancelled, self.is_chosen, self.is_evicted, value

    def take_rows(self, original: Snapshot, rows_of: RowsOf) -> None:
        """Take all rows that are still to be written, before the cache drops them.

        Raises StateError or MemoryError, as ``rows_of`` does.
        """
        first = self.next_segment.start if self.next_segment is not None else 0
        copies = {
            copy: segment
            for copy, segment in zip(self.snapshot.chain, original.chain, strict=True)
            if copy.start >= first
        }
        if self.next_segment is None:
            for copy in copies:
                if copy.file.is_there:
                    copy.drop()
        lacking = [copy for copy in copies if copy.device_only_bytes]
        blocks = rows_of([copies[copy] for copy in lacking])
        for copy, block in zip(lacking, blocks, strict=True):
            copy.held = None  # first: a turn that ends now drops the rows that the device holds
            copy.rows = block

    def rows_from_cache(self, segment: Segment, rows_of: RowsOf) -> Block:
        """Return the rows of ``segment``, which is in `snapshot`, from the original in the cache.

        Raises NotWrittenError if they are gone, StateError or MemoryError as ``rows_of`` does.
        """
        original = self.original()
        if original is None or original.segment.dropped or not original.facts.for_disk:
            raise NotWrittenError("others needed the cells of its rows, or it was dropped")
        # Its end may lie within its child: a segment counts only up to the start of that.
        (block,) = rows_of([original.segment_at(segment.start + 1)])
        return block

    def restart(self) -> None:
        """Start again at the first segment, with a new write, in the next turn.

        The rows that were copied from the device for a turn are dropped: the cache still has them.
        """
        self.writing = None
        self.next_segment = None
        for segment in self.snapshot.chain:
            if segment.held is not None:
                segment.rows = NOTHING

    def forbid_publishing(self) -> None:
        """Keep the running write from publishing the snapshot."""
        self.snapshot.facts = replace(self.snapshot.facts, for_disk=False)  # of the copy

    def mark_handled(self) -> None:
        """Keep the cache from offering the snapshot again before it is used."""
        original = self.original()
        if original is not None:
            original.facts = replace(original.facts, for_disk=False)


def detached_copy(snapshot: Snapshot) -> Snapshot:
    """Return a copy with its own segments, which share the bytes: no eviction takes them away."""
    parent: Segment | None = None
    for segment in reversed(snapshot.chain):
        held = segment.held if segment.device_only_bytes else None
        parent = replace(segment, parent=parent, references=0, held=held)
    assert parent is not None
    return Snapshot(
        snapshot.prefix, parent, snapshot.state, snapshot.exact, snapshot.hits, used=snapshot.used
    )
