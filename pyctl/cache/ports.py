"""What the cache needs of others: a memory that holds sequences, facts of a request, and how it is to be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pyctl.cache.persist import DiskPolicy
from pyctl.cache.places import ResumePlaces
from pyctl.cache.snapshot import Block, BlockBytes, BlockSpan, Held, Span, State
from pyctl.prompt import Prompt, Tokens

__all__ = ["CacheOptions", "CacheRequest", "SavedSequence", "SequenceMemory"]


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


class SequenceMemory(Protocol):
    """Moves what sequences hold: rows, which can be cut anywhere, and the state at the end.

    An ``attention`` model has only rows, a ``hybrid`` both, and of an ``opaque`` one everything is the state. Rows or a
    state that do not fit raise StateError before the sequence is changed, and OutOfCellsError where only the room for
    them is missing.

    Rows can be *held*: they stay on the device whatever becomes of their sequence, in cells that sequences do not see.
    What needs such a cell has its rows moved to another one first, and is refused with OutOfCellsError if there is
    none, so held rows are never lost by themselves. A cell that a sequence has and that is held counts once, as does
    one that is held twice. In a pool nothing moves: a position has one cell, refused until what is held is released.

    A draft model beside it has rows of its own, and may have a part of the state (`State.draft`). Only drafts depend on
    these: where they are empty, or another draft model's, it goes on without them, and nothing raises.
    """

    @property
    def kind(self) -> Literal["attention", "hybrid", "opaque"]:
        """Rows alone, rows and a state, or a state of the whole sequence that nobody can look into."""

    @property
    def places(self) -> ResumePlaces:
        """At which token counts a sequence may be saved, because it comes back to the same bits from there."""

    def rows_size(self, first: int, last: int) -> int:
        """Bytes of the block that holds rows [first, last); 0 if empty or for kind ``opaque``.

        Exactly so many a block must have to be loaded; StateError if no sequence can have such positions."""

    def state_size(self, seq: int) -> int:
        """Bytes of the model's own part of the state at the end of ``seq``; 0 for kind ``attention``."""

    def save_rows(self, seq: int, first: int, last: int) -> Block:
        """Rows [first, last) of ``seq``; empty for kind ``opaque``. The bytes are there after `synchronize`."""

    def save_state(self, seq: int, n: int) -> State:
        """That of ``seq``, which ends at ``n``: of ``attention`` the draft model's part. There after `synchronize`."""

    def draft_rows_size(self, first: int, last: int) -> int:
        """Bytes of the draft model's rows [first, last), as `rows_size`; 0 without one."""

    def draft_state_size(self) -> int:
        """Bytes of the draft model's part of a state, 0 if it has none."""

    def save_draft_rows(self, seq: int, first: int, last: int) -> Block:
        """The draft model's rows [first, last) of ``seq``; empty if there are none. There after `synchronize`."""

    def synchronize(self) -> None:
        """Wait until every block that was saved is complete. What loads blocks need not wait."""

    def block_bytes(self) -> BlockBytes:
        """What saved blocks take now."""

    def expect_blocks(self, n_bytes: int) -> None:
        """Let memory for so much that will be saved soon be made ready meanwhile."""

    @property
    def can_hold(self) -> bool:
        """Whether rows can be held; without, `hold` raises StateError."""

    @property
    def is_pool(self) -> bool:
        """Whether the rows of the one sequence have a place each."""

    def hold(self, seq: int, first: int, last: int) -> Held:
        """Have rows [first, last) of ``seq``, which has them (StateError), stay on the device until `release`."""

    def release(self, held: Held) -> None:
        """Let held rows go; twice is harmless."""

    def release_all(self) -> None:
        """Let all held rows go: they belong to one cache, and another one begins."""

    def fetch(self, held: Held, first: int, last: int) -> Block:
        """A copy of held rows [first, last), as `save_rows` makes it, there after `synchronize`; they may be released
        before that."""

    def n_own(self, held: Held, first: int, last: int) -> int:
        """Cells of held rows [first, last) that neither a sequence nor other held rows have: what `release` frees."""

    @property
    def n_held(self) -> int:
        """Cells that held rows alone take."""

    def load_rows(self, seq: int, first: int, spans: Sequence[Span]) -> None:
        """Append rows to ``seq``, which ends at ``first``.

        Held ones that no other sequence has lie in the cells of this one afterwards, and take no further ones.
        """

    def load_draft_rows(self, seq: int, first: int, spans: Sequence[BlockSpan]) -> None:
        """Append the draft model's rows to ``seq``, whose own were loaded; blocks may be empty."""

    def load_state(self, seq: int, n: int, state: State) -> None:
        """Replace the state of ``seq`` by one saved at ``n``; of kind ``attention``, the draft model's alone."""

    def load_prefix(
        self, seq: int, first: int, n: int, spans: Sequence[Span], draft_spans: Sequence[BlockSpan], state: State
    ) -> None:
        """Rows [``first``, ``n``) and the state there, as `load_rows`, `load_draft_rows` and `load_state` would, but at
        the same time where that is possible. Not of kind ``opaque``. Rows that find no cells leave ``seq`` empty."""

    def rewind(self, seq: int, n: int) -> None:
        """Drop rows from ``n`` on; a hybrid needs its state at ``n`` loaded next."""

    def clear(self, seq: int) -> None:
        """Drop everything ``seq`` holds."""

    def save_file(self, seq: int, path: Path, tokens: Tokens, ends: Sequence[int]) -> int:
        """Write ``seq``, which holds ``tokens``, to ``path``; returns the bytes of the file.

        ``ends`` are the batch ends that a cold run would have, too. Not with a pool. Raises StateError.
        """

    def load_file(self, seq: int, path: Path) -> SavedSequence:
        """Fill ``seq``, which is empty, from such a file. Raises StateError, and then nobody knows what it holds."""
