"""The ports of the cache: facts of a request, a memory that holds sequences, and a store beyond
RAM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, TypeAlias

import msgspec

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.condemned import Condemned
from pyctl.cache.costs import Costs
from pyctl.cache.device_limits import DeviceLimits
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.pending_snapshot import PendingSnapshot
from pyctl.cache.plan import DEFAULT_STEP
from pyctl.cache.reads import Reading, Reads
from pyctl.cache.recent import RecentMatches, RecentPrompts
from pyctl.cache.resume_points import ResumePoints
from pyctl.cache.retention import NO_RETENTION, Retention
from pyctl.cache.snapshot import (
    Block,
    BlockBytes,
    HeldRows,
    Prefix,
    PromptMatch,
    Rows,
    Segment,
    Snapshot,
    Span,
    State,
)
from pyctl.prompt import Prompt

__all__ = [
    "AGAIN_SECONDS",
    "CacheOptions",
    "CacheRequest",
    "DeviceCells",
    "DiskView",
    "Entry",
    "FlushCopies",
    "MemoryShape",
    "RowsOf",
    "SequenceMemory",
    "SnapshotSource",
    "Store",
    "StoreView",
    "StoredChecks",
    "Written",
]


@dataclass(frozen=True)
class CacheRequest:
    """The facts of a request that the cache needs.

    Attributes:
        prompt: The prompt.
        cache_prompt: Whether its client allows caching.
        may_read_prompts: Whether the client may learn the texts of other clients. Otherwise it
            resumes in whole blocks of tokens.
        disk_policy: The policy that replaces the server's, None for the server's.
        retention: The announcement of its client about the next use of the prompt.
        background: Whether no client waits for it.
        after: The request whose continuation it prepares, None for others.
    """

    prompt: Prompt
    _: KW_ONLY
    cache_prompt: bool = True
    may_read_prompts: bool = True
    disk_policy: DiskPolicy | None = None
    retention: Retention = NO_RETENTION
    background: bool = False
    after: CacheRequest | None = field(default=None, repr=False, compare=False)

    @property
    def may_save(self) -> bool:
        """True if snapshots of the prompt and its reply may stay after the request."""
        return self.cache_prompt and not self.retention.evict_on_complete


class CacheOptions(msgspec.Struct, frozen=True):
    """The settings of evaluating prompts and taking snapshots; see `plan`.

    Attributes:
        min_step: The tokens between the snapshots of a long stretch, 0 for no snapshots there.
        exact: Whether nothing is reused that a cold run would not have computed the same way.
        device: The limits of the rows that leave the device.
    """

    min_step: int = DEFAULT_STEP
    exact: bool = False
    device: DeviceLimits = DeviceLimits()


@dataclass(frozen=True)
class MemoryShape:
    """Facts of a memory that do not change while its model is loaded.

    Attributes:
        resume_points: The token counts at which a sequence may be saved, as it is restored to the
            same bits there.
        sizes: The sizes of saved blocks.
        cut_anywhere: Whether a sequence continues wherever it was cut. Otherwise it also needs the
            state there.
        has_rows: Whether a sequence has rows as well as a state. Otherwise nothing of it can stay
            when another state is loaded.
        can_hold: Whether the device holds rows for the cache.
        is_pool: Whether each row of the one sequence has a certain cell.
    """

    resume_points: ResumePoints
    sizes: BlockSizes
    cut_anywhere: bool = False
    has_rows: bool = True
    can_hold: bool = False
    is_pool: bool = False

    def n_kept_rows(self, n: int) -> int:
        """Return how many of the first ``n`` tokens of a sequence can stay where further rows or a
        state are loaded.
        """
        return n if self.has_rows else 0


class DeviceCells(Protocol):
    """The cells of a memory on the device, where rows can be *held* for the cache.

    Held rows stay on the device whatever becomes of their sequence, in cells that
    sequences do not see. An operation that needs such a cell moves its rows to another one
    first, and is refused with OutOfCellsError if there is none, so held rows are never lost. A cell
    that a sequence has and that is held counts once, as does one that is held twice. In a pool
    nothing moves: a position has one cell, refused until the held row is released.
    """

    def hold_rows(self, seq: int, first: int, last: int) -> HeldRows:
        """Keep rows [first, last) of ``seq`` on the device until `release`. Raises StateError if
        ``seq`` does not have them, or the device cannot hold them.
        """

    def release(self, held: HeldRows) -> None:
        """Release held rows; a second call is harmless."""

    def release_all(self) -> None:
        """Release all held rows: they belong to one cache, and another one starts."""

    def fetch(self, held: HeldRows, first: int, last: int) -> Block:
        """Copy held rows [first, last) into a block, complete after `synchronize`. The rows may be
        released before that.
        """

    def n_exclusive_cells(self, held: HeldRows, first: int, last: int) -> int:
        """Return the number of cells of held rows [first, last) that neither a sequence nor other
        held rows have: the cells that `release` frees.
        """

    @property
    def n_held_cells(self) -> int:
        """Cells that held rows alone take."""


class SequenceMemory(Protocol):
    """The memory of sequences: their rows, which can be cut anywhere, and the state at the end.

    Rows and states have parts: the model's own, and a draft model's that follows it. Only drafts
    depend on the latter: if they are empty, or another draft model's, it goes on without them, and
    nothing raises. Parts that the model does not have are empty: the rows of one without rows, the
    state of one that needs none.

    Rows or a state that do not fit raise StateError before the sequence is changed, and
    OutOfCellsError where only the room for them is missing.
    """

    @property
    def shape(self) -> MemoryShape:
        """The capabilities of the memory."""

    @property
    def cells(self) -> DeviceCells:
        """The cells of the device."""

    def state_size(self, seq: int, ends: Sequence[int] = ()) -> int:
        """Return the bytes of all parts of a state at the end of ``seq``.

        With ``ends``, ascending, return the maximum that the states there add, together, to those
        that are saved already: of a window only the rows that no state has.
        """

    def save_rows(self, seq: int, first: int, last: int, *, hold: bool = False) -> Rows:
        """Save all parts of rows [first, last) of ``seq``, the model's own as
        `DeviceCells.hold_rows` does if ``hold`` is set.

        The bytes are complete after `synchronize`.
        """

    def save_state(self, seq: int, n: int) -> State:
        """Save all parts of the state of ``seq``, which ends at ``n``. The bytes are complete after
        `synchronize`.
        """

    def restore(
        self, seq: int, first: int, spans: Sequence[Span], state: State | None = None
    ) -> None:
        """Append rows to ``seq``, which ends at ``first``, and replace its state by ``state``,
        saved where they end.

        Held rows that no other sequence has lie in the cells of this one afterwards, and take no
        further ones. Rows that find no cells leave ``seq`` empty if there is a state. Rows without
        a state need it loaded next, unless they are enough.
        """

    def synchronize(self) -> None:
        """Wait until every block that was saved is complete. Loads of blocks need not wait."""

    def block_bytes(self) -> BlockBytes:
        """Return the bytes of all saved blocks."""

    def rewind(self, seq: int, n: int) -> None:
        """Drop rows from ``n`` on, at 0 as `clear`; unless rows are enough, it needs the state at
        ``n`` next.
        """

    def rollback(self, seq: int, n: int) -> int:
        """Take back the tokens that the last evaluation added to ``seq`` from ``n`` on, drafts
        only, and once only.

        Returns how many tokens the sequence holds now: ``n``, or fewer when it had to go back to a
        mark. StateError beyond the rollback distance; the sequence is empty then.
        """

    def clear(self, seq: int) -> None:
        """Drop everything ``seq`` holds."""


# -- the store
# ----------------------------------------------------------------------------------

RowsOf: TypeAlias = Callable[[Sequence[Segment]], Sequence[Block]]
"""The rows of segments that may lie on the device, in RAM; StateError, or MemoryError if it has no
room for them.
"""

FlushCopies: TypeAlias = Callable[[], object]
"""Completes the copies of all bytes that are to be written, and copies the segment that a write
needs, now or soon.
"""

AGAIN_SECONDS = 0.02
"""Seconds until the next look whether a segment is written, or RAM has room for one."""


class Written(msgspec.Struct, frozen=True):
    """``n`` snapshots that were written, and their bytes."""

    n: int = 0
    n_bytes: int = 0

    def plus(self, n_bytes: int) -> Written:
        """Return the sums with one more snapshot of ``n_bytes``."""
        return Written(self.n + 1, self.n_bytes + n_bytes)


class StoreView(msgspec.Struct, frozen=True):
    """Sums of the object store, of one model.

    Attributes:
        name: The store's label.
        in_use: The number of snapshots in the store.
        n_bytes: Their bytes.
        fetched: The snapshots that this process fetched.
        sent: The snapshots that this process sent.
        is_away: Whether the store is left alone after failures.
    """

    name: str
    in_use: int
    n_bytes: int
    fetched: Written
    sent: Written
    is_away: bool = False


class DiskView(msgspec.Struct, frozen=True):
    """Sums of the disk tier.

    Attributes:
        policy: The name of the policy.
        in_use: The number of lengths at which a state is stored.
        n_bytes: The bytes of the directory.
        budget: The maximum of these bytes, -1 for no limit.
        hits: The number of restores from disk.
        written: The snapshots that this process wrote.
        damaged: The files that were found damaged.
        waiting: The snapshots that wait to be written.
        failed: The writes that failed.
        spilled: The snapshots among ``written`` that were written because RAM evicted them.
        given_up: The snapshots that were dropped before they were written.
        interim: The snapshots among ``written`` whose prompts were still being evaluated.
        store: Sums of the object store, None without one.
    """

    policy: str
    in_use: int
    n_bytes: int
    budget: int
    hits: int
    written: Written
    damaged: int
    waiting: int = 0
    failed: int = 0
    spilled: Written = Written()
    given_up: int = 0
    interim: Written = Written()
    store: StoreView | None = None


SHORT_DIGITS = 10
"""Digits of a snapshot's digest by which people call it."""


@dataclass(frozen=True)
class Entry:
    """A snapshot in the store. Times are in seconds since the epoch.

    Attributes:
        fingerprint: The fingerprint of its model.
        name: The name of its prefix.
        n: The number of tokens.
        n_bytes: The bytes of its state and of the rows that no shallower snapshot has.
        created: When it was written.
        used: When it was used last.
        hits: How many times it was used.
        pinned: Whether it is pinned.
        exact: Whether all of it came from batches of a cold run.
        parent: The name of the deepest shallower snapshot on its chain, "" for none.
        label: A text for users with the start and the end of the prefix.
        is_older: Whether it was made under older rules of batch ends, so that no prompt resumes
            there.
    """

    fingerprint: str
    name: str
    n: int
    n_bytes: int
    created: float
    used: float
    hits: int
    pinned: bool
    exact: bool
    parent: str
    label: str
    is_older: bool = False

    @property
    def short(self) -> str:
        """The beginning of the digest in ``name``, by which people call it."""
        return self.name.partition("-")[2][:SHORT_DIGITS]


class SnapshotSource(Protocol):
    """A snapshot whose parts are read one by one, all from the same place: a check compares the
    bytes of that place.
    """

    @property
    def snapshot(self) -> Snapshot:
        """The tokens, batch ends and segments; its bytes are those of `rows` and `state`."""

    def rows(self, segment: Segment) -> Reading[Rows]:
        """Return the rows of a ``segment`` of the snapshot. Raises DamagedError, StateError or
        OSError.
        """

    def state(self) -> Reading[State]:
        """Return the state. Raises DamagedError, StateError or OSError."""


class StoredChecks(Protocol):
    """The snapshots of a store as checks use them."""

    def prefixes(self) -> list[Prefix]:
        """Return the prefixes of all snapshots in the store."""

    def source(self, prefix: Prefix) -> Reading[SnapshotSource | None]:
        """Open ``prefix`` to read it again, without the copies that RAM has; return None if it is
        gone. Raises DamagedError, StateError or OSError.
        """

    def condemn(self, condemned: Condemned) -> None:
        """Find nothing that is ``condemned`` from now on, and keep some of its files for a
        report.
        """


class Store(Protocol):
    """A store of snapshots beyond RAM, which outlives the process. The engine's thread calls it and
    never waits for the medium.

    Attributes:
        policy: The policy for requests that name none.
        recent: The recent prompts by which the policy chooses.
        costs: The measured costs, which the cache replaces by its own.
        close_seconds: The maximum seconds of `close`.
        interim_seconds: The seconds of evaluation after which an interim snapshot is written, 0 for
            none.
        on_rows_needed: The function to call, on any thread, when a write waits for `supply_rows`.
    """

    policy: DiskPolicy
    recent: RecentPrompts
    costs: Costs
    close_seconds: float
    interim_seconds: float
    on_rows_needed: FlushCopies

    @property
    def checks(self) -> StoredChecks:
        """The stored snapshots as checks use them."""

    # -- finding and reading
    # ----------------------------------------------------------------------------------

    def find(self, prompt: PromptMatch, limit: int) -> list[Prefix]:
        """Return the prefixes of ``prompt`` of ``limit`` tokens at most that are stored, the
        deepest first.
        """

    def find_remote(self, prompt: PromptMatch, limit: int) -> list[tuple[Prefix, float]]:
        """Return the prefixes of ``prompt`` of at most ``limit`` tokens that could be fetched to
        the disk, each with the seconds of the transfer.
        """

    def fetch(self, prefix: Prefix) -> Reads | None:
        """Start to fetch ``prefix``; return None if that cannot be now."""

    def open(
        self,
        prefix: Prefix,
        prompt: PromptMatch,
        base: Snapshot | None,
        max_bytes: int | None = None,
    ) -> Reading[PendingSnapshot | None]:
        """Start to read ``prefix`` without the rows of ``base``; return None if it is gone. Beyond
        ``max_bytes``, the rest is read when the first has left RAM.
        """

    def contains(self, prefix: Prefix) -> bool:
        """Return whether the state of ``prefix`` is in the store."""

    def count_hit(self, snapshot: Snapshot) -> None:
        """Record that a snapshot from the store was of use."""

    def discard(self, snapshot: Snapshot) -> None:
        """Drop a snapshot that came from the store and is of no use to the model."""

    # -- choosing and writing
    # ----------------------------------------------------------------------------------

    def select(
        self, matches: RecentMatches, start: int, policy: DiskPolicy | None = None
    ) -> tuple[int, ...]:
        """Return the prefix lengths past ``start`` that belong in the store, of a prompt that was
        compared with ``recent``.
        """

    def write(self, snapshot: Snapshot, *, is_last: bool = False) -> None:
        """Queue a ``snapshot`` of the cache if the store may have it and lacks it, the last one
        however short; its bytes in RAM are complete.
        """

    def write_interim(self, snapshot: Snapshot) -> bool:
        """Queue a ``snapshot`` of a prompt that is still being evaluated, after all others; return
        False if the store has it or may not have it. Its bytes in RAM are complete.
        """

    def is_queued(self, prefix: Prefix) -> bool:
        """Return whether a snapshot of ``prefix`` is to be written."""

    def supersede(self, prefix: Prefix) -> None:
        """Remove the state of ``prefix`` soon, unless it was used or is pinned: the store has a
        deeper one of its prompt.
        """

    def evict(self, snapshot: Snapshot, value: float, rows_of: RowsOf) -> None:
        """Keep the part to be written of ``snapshot``, which saves ``value`` seconds and which the
        cache is about to drop.
        """

    @property
    def awaits_rows(self) -> bool:
        """True if a write waits for `supply_rows`."""

    def supply_rows(self, rows_of: RowsOf) -> None:
        """Supply the rows that a write needs, if RAM has room for them. ``rows_of`` returns
        complete blocks, and all copies of evicted snapshots are complete before the call.
        """

    @property
    def is_draining_device(self) -> bool:
        """True if rows that only the device has are being written, and the store takes them."""

    def drop_lowest_value(self) -> bool:
        """Drop the snapshot of lowest value among those that wait and take RAM; return False if
        there is none.
        """

    # -- managing
    # ----------------------------------------------------------------------------------

    @property
    def contents(self) -> object:
        """An object that is replaced at each change of the stored snapshots."""

    def entries(self) -> list[Entry]:
        """Return the snapshots of this model, the last used first. Any thread; waits for the
        medium.
        """

    def remove(self, name: str) -> bool:
        """Remove the snapshot called ``name``, also from the queue; return False if there is none.
        Any thread; waits.
        """

    def view(self) -> DiskView:
        """Return sums of the store."""

    def close(self, flush_copies: FlushCopies = lambda: None) -> bool:
        """Write the queue, within ``close_seconds``; return False if something is not written."""
