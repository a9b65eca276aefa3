"""What the cache needs of others: a memory that holds sequences, facts of a request, and how it is to be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pyctl.cache.disk.file_format import BlockSizes
from pyctl.cache.persist import DiskPolicy
from pyctl.cache.places import ResumePlaces
from pyctl.cache.snapshot import Block, BlockBytes, Held, Rows, Span, State
from pyctl.prompt import Prompt, Tokens

__all__ = ["CacheOptions", "CacheRequest", "MemoryShape", "SavedSequence", "SequenceMemory"]


class CacheRequest(Protocol):
    """What the cache wants to know of a request."""

    @property
    def prompt(self) -> Prompt:
        """What is asked."""

    @property
    def cache_prompt(self) -> bool:
        """Whether its client lets the cache have it."""

    @property
    def disk_policy(self) -> DiskPolicy | None:
        """What of it goes to disk; None for what the server does with all."""

    @property
    def background(self) -> bool:
        """Whether nobody waits for it."""

    @property
    def after(self) -> CacheRequest | None:
        """The request whose continuation it prepares."""


class CacheOptions(Protocol):
    """How prompts are evaluated and where snapshots are taken; see `plan`."""

    @property
    def min_batch(self) -> int:
        """The least tokens of a batch that ends at a boundary."""

    @property
    def min_step(self) -> int:
        """Tokens between the snapshots of a long stretch, 0 for none there."""

    @property
    def exact(self) -> bool:
        """Whether nothing is reused that a cold run would not have computed the same way."""


@dataclass(frozen=True)
class SavedSequence:
    """What a file held: the tokens of the sequence, its exact batch ends, and how many bytes it has."""

    tokens: Tokens
    ends: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True)
class MemoryShape:
    """Facts of a memory that do not change while its model is loaded.

    A sequence may be saved at ``places``, because it comes back to the same bits from there. ``sizes`` are those of
    saved blocks. With ``cut_anywhere`` rows are all that a sequence holds; else it also needs the state where it was
    cut. Without ``has_rows`` the state is everything: nothing of a sequence can stay when another state is loaded.
    With ``can_hold`` the device holds rows for the cache, and with ``is_pool`` the rows of the one sequence have a
    place each.
    """

    places: ResumePlaces
    sizes: BlockSizes
    cut_anywhere: bool = False
    has_rows: bool = True
    can_hold: bool = False
    is_pool: bool = False

    def kept(self, n: int) -> int:
        """How many of the first ``n`` tokens of a sequence can stay where further rows or a state are loaded."""
        return n if self.has_rows else 0


class SequenceMemory(Protocol):
    """Moves what sequences hold: rows, which can be cut anywhere, and the state at the end.

    Rows and states have parts: the model's own, and those of a draft model that follows it. Only drafts depend on the
    latter: where they are empty, or another draft model's, it goes on without them, and nothing raises. What the model
    itself does not have is empty, too: the rows of one without rows, the state of one that needs none.

    Rows or a state that do not fit raise StateError before the sequence is changed, and OutOfCellsError where only the
    room for them is missing.

    Rows can be *held*: they stay on the device whatever becomes of their sequence, in cells that sequences do not see.
    What needs such a cell has its rows moved to another one first, and is refused with OutOfCellsError if there is
    none, so held rows are never lost by themselves. A cell that a sequence has and that is held counts once, as does
    one that is held twice. In a pool nothing moves: a position has one cell, refused until what is held is released.
    """

    @property
    def shape(self) -> MemoryShape:
        """What it can do, and where."""

    def state_size(self, seq: int) -> int:
        """Bytes of all parts of a state at the end of ``seq``."""

    def save_rows(self, seq: int, first: int, last: int, *, hold: bool = False) -> Rows:
        """All parts of rows [first, last) of ``seq``, the own ones as `hold` gives them if it is wanted.

        The bytes are there after `synchronize`."""

    def save_state(self, seq: int, n: int) -> State:
        """All parts of that of ``seq``, which ends at ``n``. There after `synchronize`."""

    def restore(self, seq: int, first: int, spans: Sequence[Span], state: State | None = None) -> None:
        """Append rows to ``seq``, which ends at ``first``, and replace its state by ``state``, saved where they end.

        Held rows that no other sequence has lie in the cells of this one afterwards, and take no further ones. Rows
        that find no cells leave ``seq`` empty if there is a state. Rows without a state need it loaded next, unless
        they are enough.
        """

    def synchronize(self) -> None:
        """Wait until every block that was saved is complete. What loads blocks need not wait."""

    def block_bytes(self) -> BlockBytes:
        """What saved blocks take now."""

    def expect_blocks(self, n_bytes: int) -> None:
        """Let memory for so much that will be saved soon be made ready meanwhile."""

    def hold(self, seq: int, first: int, last: int) -> Held:
        """Have rows [first, last) of ``seq``, which has them, stay on the device until `release`; else StateError."""

    def release(self, held: Held) -> None:
        """Let held rows go; twice is harmless."""

    def release_all(self) -> None:
        """Let all held rows go: they belong to one cache, and another one begins."""

    def fetch(self, held: Held, first: int, last: int) -> Block:
        """A copy of held rows [first, last), there after `synchronize`; they may be released before that."""

    def n_own(self, held: Held, first: int, last: int) -> int:
        """Cells of held rows [first, last) that neither a sequence nor other held rows have: what `release` frees."""

    @property
    def n_held(self) -> int:
        """Cells that held rows alone take."""

    def rewind(self, seq: int, n: int) -> None:
        """Drop rows from ``n`` on, at 0 as `clear`; unless rows are enough, it needs the state at ``n`` next."""

    def clear(self, seq: int) -> None:
        """Drop everything ``seq`` holds."""

    def save_file(self, seq: int, path: Path, tokens: Tokens, ends: Sequence[int]) -> int:
        """Write ``seq``, which holds ``tokens``, to ``path``; returns the bytes of the file.

        ``ends`` are the batch ends that a cold run would have, too. Not with a pool. Raises StateError.
        """

    def load_file(self, seq: int, path: Path) -> SavedSequence:
        """Fill ``seq``, which is empty, from such a file. Raises StateError, and then nobody knows what it holds."""
