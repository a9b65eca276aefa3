"""What the sequences of one llama_context hold: rows and states, moved by the extension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pyctl.cache import (
    NOTHING,
    NOWHERE,
    Block,
    BlockBytes,
    BlockSizes,
    Held,
    MemoryShape,
    ResumePlaces,
    Rows,
    SavedSequence,
    Span,
    State,
)
from pyctl.engine.pool.pool_plan import PoolPlan
from pyctl.errors import OutOfCellsError, StateError
from pyctl.llama.draft.draft_model import Follower
from pyctl.llama.library import HostBuffer, allocate, checked
from pyctl.llama.llama_tokenizer import LlamaTokenizer
from pyctl.llama.sequence_file import StateForm, load_file, save_file
from pyctl.prompt import Tokens

__all__ = ["ContextMemory", "HeldRows"]


@dataclass(frozen=True, eq=False)
class HeldRows:
    """``n_cells`` rows on the device, ``n_bytes`` as a block; the extension knows them by ``handle``."""

    handle: int
    n_cells: int
    n_bytes: int


class ContextMemory:
    """The `SequenceMemory` of `LlamaBackend`, which opens and closes the context."""

    tokenizer: LlamaTokenizer
    identity: str
    places: ResumePlaces
    n_ctx: int
    n_cells: int
    n_seqs: int
    n_ubatch: int
    _ctx: Any
    _memory: Any = None  # KVState, while the context lives
    _drafts: Follower
    _least: dict[int, tuple[int, int]]
    _handles: set[int]  # of what is held
    _pool: PoolPlan | None
    _sizes: BlockSizes

    @property
    def kind(self) -> Literal["attention", "hybrid", "opaque"]:
        """Rows alone, rows and a state, or a state of the whole sequence that is llama.cpp's own."""
        kind: Literal["attention", "hybrid", "opaque"] = self._memory.kind
        return kind

    @property
    def is_async(self) -> bool:
        """Whether rows and states are copied beside the evaluation; GPUs have to hold them all for that."""
        return bool(self._memory.is_async)

    @property
    def layout(self) -> str:
        """What rows and states look like, as text."""
        return str(self._memory.layout)

    @property
    def shape(self) -> MemoryShape:
        kind = self.kind
        return MemoryShape(
            self.places,
            self._sizes,
            kind == "attention",
            kind != "opaque",
            self._memory.can_hold,
            self._pool is not None,
        )

    def _measured(self) -> BlockSizes:
        """What the blocks of the memory and of what drafts measure."""
        one, two = (self._memory.rows_size(0, n) if self.kind != "opaque" else 0 for n in (1, 2))
        state = self._memory.state_size(0) if self.kind != "opaque" else -1
        if (drafts := self._drafts.model) is None:
            return BlockSizes(2 * one - two, two - one, state)
        draft_one, draft_two = drafts.rows_size(0, 1), drafts.rows_size(0, 2)
        draft_sizes = 2 * draft_one - draft_two, draft_two - draft_one, drafts.state_size(0)
        return BlockSizes(2 * one - two, two - one, state, *draft_sizes)

    def state_size(self, seq: int) -> int:
        return int(self._memory.state_size(seq)) + self._sizes.draft_state

    def synchronize(self) -> None:
        if self._ctx is not None:
            self._memory.finish()
        if drafts := self._drafts.settled():
            drafts.synchronize()

    def block_bytes(self) -> BlockBytes:
        in_flight = self._memory.in_flight_bytes if self._ctx is not None else 0
        in_flight += self._drafts.model.in_flight_bytes if self._drafts.model is not None else 0
        return BlockBytes(HostBuffer.used(), HostBuffer.held(), in_flight)

    def expect_blocks(self, n_bytes: int) -> None:
        HostBuffer.reserve(n_bytes)

    def save_rows(self, seq: int, first: int, last: int, *, hold: bool = False) -> Rows:
        draft = self._drafts.save_rows(seq, first, last)
        if hold:
            return Rows(self.hold(seq, first, last), draft)
        if self.kind == "opaque":
            return Rows(NOTHING, draft)
        block = allocate(self._memory.rows_size(first, last))
        checked(self._memory.save_rows, seq, first, last, block)
        return Rows(block, draft)

    def save_state(self, seq: int, n: int) -> State:
        draft = self._drafts.save_state(seq, n)
        if self.kind == "attention":
            return State.of(NOTHING, draft)
        # llama.cpp itself must not copy across two pinned ranges, and the state of kind `opaque` is its own.
        block = allocate(self._memory.state_size(seq), pinned=self.kind != "opaque")
        checked(self._memory.save_state, seq, n, block)
        return State.of(block, draft)

    # -- rows that stay on the device --------------------------------------------------------------------------------

    def hold(self, seq: int, first: int, last: int) -> HeldRows:
        held = HeldRows(checked(self._memory.hold, seq, first, last), last - first, self._sizes.rows(first, last))
        self._handles.add(held.handle)
        return held

    def release(self, held: Held) -> None:
        if self._ctx is not None and _handle(held) in self._handles:
            self._handles.remove(_handle(held))
            self._memory.release(_handle(held))

    def release_all(self) -> None:
        while self._handles:
            self._memory.release(self._handles.pop())

    def fetch(self, held: Held, first: int, last: int) -> Block:
        block = allocate(self._sizes.rows(first, last))
        checked(self._memory.fetch, _handle(held), first, last, block)
        return block

    def n_own(self, held: Held, first: int, last: int) -> int:
        return int(checked(self._memory.n_own, _handle(held), first, last))

    @property
    def n_held(self) -> int:
        return int(self._memory.n_held) if self._memory.can_hold else 0

    @property
    def n_free(self) -> int:
        """Cells that neither a sequence nor held rows take."""
        if self._memory.can_hold:
            return int(self._memory.n_free)
        return self.n_cells - sum(map(self._n_held, range(self.n_seqs)))

    def _reserve(self, n: int, *, in_parts: bool = False) -> None:
        """Have nothing held where ``n`` tokens will go that are evaluated or read next; OutOfCellsError if it cannot.

        ``in_parts`` if llama.cpp may divide them: then there may have to be twice as many free cells.
        """
        if self._memory is not None:
            checked(self._memory.reserve, n, in_parts)

    # -- back into sequences -----------------------------------------------------------------------------------------

    def restore(self, seq: int, first: int, spans: Sequence[Span], state: State | None = None) -> None:
        n = spans[-1][2] if spans else first
        if self.kind == "attention" and state is not None and not state.parts:
            state = None
        self._load_own(seq, first, n, spans, state)
        if drafts := self._drafts.settled():
            if spans:
                drafts.load_rows(seq, first, [(rows.draft, at, last) for rows, at, last in spans])
            if state is not None:
                drafts.load_state(seq, n, state.draft)

    def _load_own(self, seq: int, first: int, n: int, spans: Sequence[Span], state: State | None) -> None:
        """The model's own parts: rows [``first``, ``n``), and the state there."""
        self._least.pop(seq, None)
        block = state.recurrent if state is not None and self.kind != "attention" else None
        if self.kind == "opaque":
            if block is not None and n - self._n_held(seq) > self.n_free:
                raise OutOfCellsError  # the state holds everything; llama.cpp would only say that it failed
            spans = ()
        sources = [(rows.block if rows.held is None else _handle(rows.held), at, last) for rows, at, last in spans]
        if sources and block is not None:
            checked(self._memory.load_prefix, seq, first, sources, n, block)
        elif sources:
            checked(self._memory.load_rows, seq, first, sources)
        elif block is not None:
            checked(self._memory.load_state, seq, n, block)

    def _n_held(self, seq: int) -> int:
        return int(self._memory.n_tokens(seq))

    def rewind(self, seq: int, n: int) -> None:
        self._least.pop(seq, None)
        checked(self._memory.rewind, seq, n)
        if drafts := self._drafts.settled():
            drafts.rewind(seq, n)

    def clear(self, seq: int) -> None:
        self._least.pop(seq, None)
        self._memory.clear(seq)
        self._drafts.forget(seq)
        if self._drafts.model is not None:
            self._drafts.model.clear(seq)

    def save_file(self, seq: int, path: Path, tokens: Tokens, ends: Sequence[int]) -> int:
        if tokens.size and int(tokens.min()) < 0:
            raise StateError("Unable to save slot: it holds an image")
        if self.places == NOWHERE:
            raise StateError("Unable to save slot: this model's memory does not come back to the same bits")
        self._reserve(0)
        return save_file(self._ctx, seq, path, tokens, ends, self.identity)

    def load_file(self, seq: int, path: Path) -> SavedSequence:
        form = StateForm.of(self.layout) if self.kind != "opaque" else None
        self._least.pop(seq, None)
        n_vocab = self.tokenizer.n_vocab
        saved = load_file(self._ctx, seq, path, self.n_ctx, n_vocab, self.identity, form, self._reserve)
        n = int(saved.tokens.size)
        self._check_positions(seq, n)
        return saved if self.places.allow(n) else replace(saved, ends=())

    def _check_positions(self, seq: int, n: int) -> None:
        """StateError unless ``seq`` has a row at each position below ``n`` and its state stands there.

        llama.cpp takes positions from a file as they are, and files of llama-server have no checksum.
        """
        if n and self.kind != "opaque":
            block = allocate(self._memory.rows_size(0, min(n, self.n_ubatch)))
            for first in range(0, n, self.n_ubatch):
                last = min(first + self.n_ubatch, n)
                part = block[: self._memory.rows_size(first, last)]
                checked(self._memory.save_rows, seq, first, last, part)
                self._memory.finish()
        if n and self.kind == "hybrid":
            self.save_state(seq, n)
            self._memory.finish()


def _handle(held: Held) -> int:
    if not isinstance(held, HeldRows):
        raise StateError("these rows are held by something else")
    return held.handle
