"""A model without weights whose next token depends on each stored row and on the state.

A row is 8 bytes, computed from the row before it, the token and the position. The state is folded
from all rows. Logits are a digest of the bytes of all rows and of the state, as they lie in the
cells: one that is missing, stale, or of another position or model changes the next token. A model
with ``rounds`` also mixes the size of the batch into each row, as the rounding of a real one does:
then only the batches of a cold run give the reply of a cold run.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.simulated import SizedBackend
from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.ports import MemoryShape
from pyctl.cache.resume_points import ANYWHERE
from pyctl.cache.snapshot import NOTHING, Block, BlockBytes, HeldRows, Rows, Span, State
from pyctl.engine.backend import BackendFacts, SequenceTokens
from pyctl.errors import EngineError, OutOfCellsError, StateError
from pyctl.prompt import Tokens, as_tokens

Words = NDArray[np.uint64]
"""Rows or states, shape (n,)."""

ROW_BYTES = 8

STATE_WORDS = 16
"""Words of a state, all of them folded from the same rows: as large as 16 rows, the share of a
hybrid model's state at this scale.
"""

MAX_ROWS = 1 << 13
"""Rows for which powers are computed ahead, more than any context here has."""

END = 0
"""The token that ends a reply; one of END_ONE_OF tokens is."""

END_ONE_OF = 97

FIRST_ID = 1_000
"""The lowest id in a prompt; replies have lower ones."""

_ROW_FACTOR = 0x9E3779B97F4A7C15
_STATE_FACTOR = 0xD1342543DE82EF95


def _powers(factor: int) -> Words:
    """Return ``factor`` to the powers 0, 1, ..., modulo 2**64."""
    powers = [1]
    for _ in range(MAX_ROWS):
        powers.append(powers[-1] * factor % 2**64)
    return np.array(powers, np.uint64)


_ROW_POWERS = _powers(_ROW_FACTOR)
_INVERSE_POWERS = _powers(pow(_ROW_FACTOR, -1, 2**64))
_STATE_POWERS = _powers(_STATE_FACTOR)
_LANES = np.arange(1, STATE_WORDS + 1, dtype=np.uint64)


def _mix(words: Words) -> Words:
    """Return ``words`` with all bits mixed (SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


@dataclass(frozen=True)
class Weights:
    """The arithmetic of a model.

    Attributes:
        seed: Other seeds give other rows for the same tokens.
        is_hybrid: Whether the model has a state, so that a sequence cannot be cut anywhere.
        rounds: Whether rows depend on the size of their batch.
    """

    seed: int
    is_hybrid: bool
    rounds: bool

    def rows(self, before: int, tokens: Tokens, start: int) -> Words:
        """Return the rows of ``tokens`` as one batch from position ``start`` on, after the row
        ``before``, 0 for none.
        """
        n = int(tokens.size)
        salt = (self.seed << 40) ^ (n << 32 if self.rounds else 0)
        words = tokens.astype(np.uint64) << np.uint64(20)
        words += np.arange(start, start + n, dtype=np.uint64)
        inputs = _mix(words ^ np.uint64(salt))
        # The recurrence row = factor * before + input, for all rows at once.
        first = np.uint64(before * _ROW_FACTOR % 2**64)
        sums = first + np.cumsum(inputs * _INVERSE_POWERS[:n], dtype=np.uint64)
        rows: Words = sums * _ROW_POWERS[:n]
        return rows

    def state(self, before: Words, rows: Words) -> Words:
        """Return the state after ``rows``, given the one ``before`` them; empty without a state."""
        if not self.is_hybrid:
            return before
        n = rows.size
        folded = np.sum(_mix(rows) * _STATE_POWERS[n - 1 :: -1][:n], dtype=np.uint64)
        state: Words = before * _STATE_POWERS[n] + folded * _LANES
        return state

    @property
    def empty_state(self) -> Words:
        """The state before any row."""
        return np.zeros(STATE_WORDS if self.is_hybrid else 0, np.uint64)

    @staticmethod
    def logits(rows: Words, state: Words) -> int:
        """Return a digest of all rows and of the state."""
        digest = hashlib.blake2b(rows.tobytes(), digest_size=8)
        digest.update(state.tobytes())
        return int.from_bytes(digest.digest(), "little")


def token_of(logits: int) -> int:
    """Return the likeliest token."""
    if logits % END_ONE_OF == 0:
        return END
    return 1 + (logits >> 8) % (FIRST_ID - 1)


def cold_reply(weights: Weights, prompt: Tokens, ends: Sequence[int], n: int) -> list[int]:
    """Return the first ``n`` tokens of the reply to ``prompt``, evaluated from nothing in batches
    that end at ``ends``; the end token is left out.
    """
    whole = np.empty(prompt.size + n, np.uint64)
    state = weights.empty_state
    start = 0
    for end in ends:
        before = int(whole[start - 1]) if start else 0
        whole[start:end] = weights.rows(before, prompt[start:end], start)
        state = weights.state(state, whole[start:end])
        start = end
    reply: list[int] = []
    while len(reply) < n:
        token = token_of(weights.logits(whole[:start], state))
        if token == END:
            break
        reply.append(token)
        one = weights.rows(int(whole[start - 1]), as_tokens([token]), start)
        whole[start : start + 1] = one
        state = weights.state(state, one)
        start += 1
    return reply


class DigestModel(SizedBackend):
    """A backend of ``weights``, whose cells have contents. A free cell is overwritten, so a
    sequence or a copy that still reads it shows.

    Saved blocks are zeros until `synchronize`. ``spend`` gets the tokens of each evaluation, for
    the clock, and may raise EngineError; ``allocate`` is called before memory for a block is
    allocated, and may raise MemoryError.
    """

    def __init__(
        self,
        weights: Weights,
        n_cells: int,
        n_seqs: int,
        n_ubatch: int,
        batch_cost: int,
        spend: Callable[[int, bool], None],
        allocate: Callable[[], None],
    ) -> None:
        """Prepare ``n_seqs`` empty sequences in ``n_cells`` cells."""
        state_bytes = STATE_WORDS * ROW_BYTES if weights.is_hybrid else 0
        super().__init__(
            n_cells, n_seqs, ROW_BYTES, state_bytes, n_ubatch=n_ubatch, batch_cost=batch_cost
        )
        self.weights = weights
        self.facts = BackendFacts(
            n_cells, n_cells, n_seqs, n_ubatch, max(n_ubatch, n_seqs), batch_cost
        )
        self._spend_tokens = spend
        self._allocate = allocate
        self._contents = np.zeros(n_cells, np.uint64)
        self._states = [weights.empty_state for _ in range(n_seqs)]
        self._logits: list[int] = []
        self._copies: list[tuple[Block, bytes]] = []
        self._used = 0

    @property
    def shape(self) -> MemoryShape:
        sizes = BlockSizes(ROW_BYTES, self.row_bytes, self.state_bytes)
        return MemoryShape(ANYWHERE, sizes, cut_anywhere=not self.weights.is_hybrid, can_hold=True)

    # -- evaluation
    # ----------------------------------------------------------------------------------

    def evaluate(
        self, seq: int, tokens: Tokens, start: int, *, output: bool = True, picture: object = None
    ) -> None:
        self._spend_tokens(int(tokens.size), False)
        if not 0 < tokens.size <= self.facts.n_ubatch:
            raise EngineError(f"a batch of {tokens.size} tokens")
        self._evaluate(seq, tokens, start)
        self._logits = [self._logits_of(seq)] if output else []

    def decode(self, items: Sequence[SequenceTokens]) -> None:
        self._spend_tokens(len(items), True)
        if sum(len(item.tokens) for item in items) > self._n_free:
            raise OutOfCellsError
        self._logits = []
        for item in items:
            (token,) = item.tokens
            self._evaluate(item.seq, as_tokens([token]), item.position)
            self._logits.append(self._logits_of(item.seq))

    def _evaluate(self, seq: int, tokens: Tokens, start: int) -> None:
        self._append(seq, int(tokens.size), start)
        cells = self._seqs[seq].cells
        before = int(self._contents[cells[start - 1]]) if start else 0
        rows = self.weights.rows(before, tokens, start)
        self._contents[cells[start:]] = rows
        self._states[seq] = self.weights.state(self._states[seq], rows)

    def _logits_of(self, seq: int) -> int:
        return self.weights.logits(self._contents[self._seqs[seq].cells], self._states[seq])

    def output(self) -> Block:
        return np.frombuffer(self._logits[0].to_bytes(8, "little"), np.uint8)

    def recall(self, output: Block) -> None:
        self._logits = [int.from_bytes(output.tobytes(), "little")]

    def sample(self, index: int) -> int:
        return token_of(self._logits[index])

    def is_end(self, token: int) -> bool:
        return token == END

    def piece(self, token: int) -> bytes:
        return b"a"

    def load(self) -> None:
        """Load the model again, with empty sequences."""

    def unload(self) -> None:
        """Give up all sequences and held rows."""
        self.release_all()
        for seq in range(len(self._seqs)):
            self.clear(seq)

    # -- blocks
    # ----------------------------------------------------------------------------------

    def save_rows(self, seq: int, first: int, last: int, *, hold: bool = False) -> Rows:
        self._allocate()
        if hold:
            return Rows(self.hold_rows(seq, first, last))
        return Rows(self._copied_rows(first, self._seqs[seq].cells[first:last]))

    def save_state(self, seq: int, n: int) -> State:
        self._allocate()
        return State.from_parts(self._copied(self._states[seq].tobytes()), NOTHING)

    def fetch(self, held: HeldRows, first: int, last: int) -> Block:
        self._allocate()
        return self._copied_rows(first, self._within(held, first, last))

    def synchronize(self) -> None:
        for block, data in self._copies:
            block[:] = np.frombuffer(data, np.uint8)
        self._copies.clear()

    def block_bytes(self) -> BlockBytes:
        return BlockBytes(self._used, self._used, sum(len(data) for _, data in self._copies))

    def _copied_rows(self, first: int, cells: NDArray[np.int64]) -> Block:
        """Return a block of the rows in ``cells``, which begins with their first position."""
        header = np.array([first], np.uint64)
        return self._copied(np.concatenate([header, self._contents[cells]]).tobytes())

    def _copied(self, data: bytes) -> Block:
        """Return a block that gets ``data`` at the next `synchronize`."""
        if not data:
            return NOTHING
        block = np.zeros(len(data), np.uint8)
        self._used += block.nbytes
        weakref.finalize(block, self._free_block, block.nbytes)
        self._copies.append((block, data))
        return block

    def _free_block(self, n_bytes: int) -> None:
        self._used -= n_bytes

    # -- sequences
    # ----------------------------------------------------------------------------------

    def restore(
        self, seq: int, first: int, spans: Sequence[Span], state: State | None = None
    ) -> None:
        self.synchronize()
        super().restore(seq, first, spans, state)

    def _load_rows(self, seq: int, first: int, spans: Sequence[Span]) -> None:
        parts = []
        for rows, start, last in spans:
            if rows.held is not None:
                parts.append(self._contents[self._within(rows.held, start, last)])
            else:
                parts.append(_rows_in(rows.block, start, last))
        contents = np.concatenate(parts)
        super()._load_rows(seq, first, spans)
        self._contents[self._seqs[seq].cells[first:]] = contents
        if not self.weights.is_hybrid:
            self._seqs[seq].at = int(self._seqs[seq].cells.size)

    def _load_state(self, seq: int, n: int, state: State) -> None:
        self._seqs[seq].at = n
        if self.weights.is_hybrid:
            self._states[seq] = state.recurrent.view(np.uint64).copy()

    def rewind(self, seq: int, n: int) -> None:
        super().rewind(seq, n)
        if not self.weights.is_hybrid:
            self._seqs[seq].at = n
        if n == 0:
            self._states[seq] = self.weights.empty_state

    def _push(self, cells: NDArray[np.int64]) -> None:
        super()._push(cells)
        self._contents[cells] = 0xDEAD


def _rows_in(block: Block, start: int, last: int) -> Words:
    """Return rows [start, last) of ``block``; StateError if it has others."""
    words = block.view(np.uint64)
    first = int(words[0]) if words.size else 0
    rows = words[1 + start - first : 1 + last - first]
    if start < first or rows.size != last - start:
        raise StateError(f"rows [{start}, {last}) are not in the block")
    return rows
