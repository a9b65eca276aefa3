"""The base of draft models, and the signatures of their saved blocks."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pyctl.cache.snapshot import NOTHING, Block
from pyctl.engine.backend import SequenceTokens
from pyctl.errors import ModelError
from pyctl.llama.library.bindings import api
from pyctl.llama.library.extension import unfit
from pyctl.llama.library.native import KVState
from pyctl.llama.library.pinned_memory import allocate

__all__ = [
    "SIGNATURE_BYTES",
    "Attach",
    "BlockSpan",
    "DraftModel",
    "SequenceRows",
    "is_signed",
]

log = logging.getLogger(__name__)

SIGNATURE_BYTES = 64
"""Bytes of the signature at the start of a draft model's saved blocks; keeps the data aligned."""


BlockSpan: TypeAlias = tuple[Block, int, int]
"""A block of the draft model's rows, and the range [first, last) of its positions."""


class SequenceRows(Protocol):
    """The rows [first, last) that a draft model has of a sequence, in which the trunk has ``end``
    tokens.
    """

    first: int
    last: int

    @property
    def end(self) -> int:
        """The trunk's tokens that were followed, with or without rows."""


class DraftModel(ABC):
    """A draft model on ``ctx``: it follows the evaluations of the model (the *trunk*) in each
    sequence, and drafts.

    It owns ``ctx`` and ``model``, its file if that is another than the trunk's, identified by
    ``identity``. ``attach`` attaches `Pulse` to the context at an address. Only the backend calls
    it.

    Missed tokens only lower the quality of drafts. Therefore its rows may start late or have gaps,
    and it ignores blocks of other draft models. Positions are token counts. ``type`` is its name in
    ``--spec-type``; `follow` needs the input rows of the trunk's ``layers``, side by side, -1 for
    the output of the last.

    The base follows the trunk and moves the rows. A subclass evaluates (`_evaluate_pending`,
    `draft`), cuts (`truncate`), and has its own state.
    """

    type: str
    layers: tuple[int, ...] = ()
    origin = 0
    """The first row: 1 if it needs a token before it."""

    def __init__(self, ctx: Any, model: Any, identity: str, attach: Callable[[int], None]) -> None:
        self._ctx = ctx
        self._model = model
        self._identity = identity
        self._address = ctypes.cast(ctx, ctypes.c_void_p).value or 0
        attach(self._address)
        self._n_batch = int(api.llama_n_ubatch(ctx))
        self._memory: Any = None
        self._signature = b""
        self._is_saving = False
        n_seqs = int(api.llama_n_seq_max(ctx))
        self._seqs: list[Any] = [self._sequence_at(0) for _ in range(n_seqs)]

    def _open_memory(self, *, defers: bool = False, marks: bool = False) -> None:
        """Attach to the memory, of which sequence 0 has a row, and drop that row. Raises
        ModelError.
        """
        try:
            self._memory = KVState(self._address, 0, defers=defers, marks=marks, unfit=unfit)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"no rows of the draft model can be moved: {error}") from error
        if reason := self._unusable():
            self._memory = None
            raise ModelError(reason)
        self._memory.clear(0)
        self._signature = _signature(self.type, self._identity, self._memory.layout)

    @abstractmethod
    def _unusable(self) -> str:
        """Return why the memory does not serve this kind of draft model, empty if it does."""

    # -- following the trunk
    # ----------------------------------------------------------------------------------

    def follow(
        self, seq: int, tokens: Sequence[int], start: int, hidden: NDArray[np.float32] | None
    ) -> None:
        """Follow the trunk's evaluation of ``tokens`` of ``seq`` from position ``start`` on.

        ``hidden``, shape (len(tokens), len(layers) * n_embd), are the trunk's rows, valid during
        the call. Positions followed before are ignored. The model may defer its evaluation.
        """
        if start > self._seqs[seq].end:  # tokens were missed
            self._restart(seq, start)
        n_past = self._seqs[seq].end - start
        new = [int(token) for token in tokens[n_past:]]
        if new:
            self._append(seq, new, hidden[n_past:] if hidden is not None else None)

    @abstractmethod
    def _append(self, seq: int, tokens: list[int], hidden: NDArray[np.float32] | None) -> None:
        """Follow ``tokens`` after those followed before, with the trunk's ``hidden`` rows."""

    @abstractmethod
    def _evaluate_pending(self, seq: int) -> SequenceRows:
        """Evaluate the tokens that were followed without rows, or on failure drop all rows; return
        what ``seq`` has then.
        """

    @abstractmethod
    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        """Return up to ``n`` drafts after each item's tokens, which are not evaluated yet.

        Items without rows before their position also get drafts, of lower quality.
        """

    @abstractmethod
    def truncate(self, seq: int, n: int) -> None:
        """Drop rows beyond the trunk's ``n`` tokens of ``seq``."""

    def rewind(self, seq: int, n: int) -> None:
        """Drop rows from ``n`` on; `load_state` of position ``n`` may come next."""
        self.truncate(seq, n)

    def clear(self, seq: int) -> None:
        """Drop everything of ``seq``."""
        self._memory.clear(seq)
        self._seqs[seq] = self._sequence_at(0)

    def _restart(self, seq: int, n: int) -> None:
        """Restart at ``n`` without earlier rows."""
        self.clear(seq)
        self._seqs[seq] = self._sequence_at(n)

    def _seek(self, seq: int, n: int) -> None:
        """End at the trunk's ``n`` tokens: drop the rows beyond, or restart there if tokens are
        missing.
        """
        end = self._seqs[seq].end
        if end > n:
            self.truncate(seq, n)
        elif end < n:
            self._restart(seq, n)

    @abstractmethod
    def _sequence_at(self, n: int) -> SequenceRows:
        """Return a sequence that starts at ``n`` without earlier rows."""

    # -- rows and state
    # ----------------------------------------------------------------------------------

    def rows_size(self, first: int, last: int) -> int:
        """Return the bytes of the block of rows [first, last), 0 if empty."""
        return SIGNATURE_BYTES + int(self._memory.rows_size(first, last)) if first < last else 0

    def save_rows(self, seq: int, first: int, last: int, out: Block | None = None) -> Block:
        """Save rows [first, last) of ``seq``; NOTHING if one is missing. The block is complete
        after `synchronize`.

        ``out``, if given, is an unsigned block of the right size to fill.
        """
        rows = self._evaluate_pending(seq)
        first_row = max(first, self.origin)
        has_rows = rows.first <= first_row and first < last <= rows.last
        if not has_rows:
            return NOTHING
        block = allocate(self.rows_size(first, last)) if out is None else out
        # The block has room for a row before `origin`, which there is not.
        n_bytes = self._memory.rows_size(first_row, last) if first_row < last else 0
        end = SIGNATURE_BYTES + n_bytes
        block[end:] = 0
        try:
            if n_bytes:
                self._memory.save_rows(seq, first_row, last, block[SIGNATURE_BYTES:end])
        except (ValueError, RuntimeError) as error:
            log.debug("rows of the draft model were not saved: %s", error)
            return NOTHING
        self._is_saving = True
        return self._signed(block)

    @abstractmethod
    def load_rows(self, seq: int, first: int, spans: Sequence[BlockSpan]) -> None:
        """Append rows to ``seq`` from ``first`` on; skip blocks that are empty or of other draft
        models.
        """

    @abstractmethod
    def state_size(self, seq: int) -> int:
        """Return the bytes of a state of ``seq`` at any position."""

    @abstractmethod
    def save_state(self, seq: int, n: int, out: Block | None = None) -> Block:
        """Save the state for drafting at ``n``, NOTHING if unknown; otherwise as `save_rows`."""

    @abstractmethod
    def load_state(self, seq: int, n: int, block: Block) -> None:
        """Continue at ``n`` from a saved state; without it if ``block`` is empty or of another
        draft model.
        """

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of blocks with copies in progress."""
        return int(self._memory.in_flight_bytes)

    def synchronize(self) -> None:
        """Wait until all saved blocks are complete."""
        self._memory.finish()
        self._is_saving = False

    def _finish_copies(self) -> None:
        """Wait for copies of rows, which must not be evaluated again meanwhile."""
        if self._is_saving:
            self.synchronize()

    def _signed(self, block: Block) -> Block:
        """Sign ``block``, which is filled then."""
        block[:SIGNATURE_BYTES] = np.frombuffer(self._signature, np.uint8)
        return block

    def _is_own(self, block: Block) -> bool:
        """Return whether ``block`` was saved by this draft model."""
        return is_signed(block, self._signature)

    # -- the end
    # ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the draft model, not its trunk."""
        self._close_memory()
        api.llama_free(self._ctx)
        if self._model is not None:
            api.llama_model_free(self._model)

    def _close_memory(self) -> None:
        """Finish copies and free device memory, which is due before its context is freed."""
        if self._memory is not None:
            self._memory.finish()
            self._memory = None

    @staticmethod
    def _log_failure(code: int) -> None:
        """Log a failed evaluation, which costs only drafts. Fatal errors also fail the trunk, which
        reports them.
        """
        if code != 0:
            log.debug("the draft model failed: llama_decode returned %d", code)


Attach: TypeAlias = Callable[[int], None]
"""Attaches `Pulse` to the context at an address."""


def _signature(*names: str) -> bytes:
    """Return the signature for blocks of the draft model identified by ``names``: type, file,
    layout.
    """
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=32).digest()
    return digest.ljust(SIGNATURE_BYTES, b"\0")


def is_signed(block: Block, by: bytes) -> bool:
    """Return whether ``block`` starts with the signature ``by``; False if empty."""
    return block.size > SIGNATURE_BYTES and block[:SIGNATURE_BYTES].tobytes() == by
