"""What follows the sequences in llama.cpp and guesses how they go on, and how blocks that it saves are signed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pyctl.cache.snapshot import Block, Span
from pyctl.engine.backend import SequenceTokens

__all__ = ["SIGNATURE_BYTES", "DraftModel", "is_signed", "signature"]

SIGNATURE_BYTES = 64
"""Bytes at the head of each saved block of a draft model that say who wrote it; what follows stays aligned."""


class DraftModel(Protocol):
    """Follows what the model (the *trunk*) evaluates in each sequence, and drafts. Called by the backend alone.

    It may have missed anything: what it drafts is then worse, and nothing else. Its rows may therefore begin late or
    have a gap, and a block that another draft model wrote is nothing to it. Positions are token counts.
    """

    @property
    def type(self) -> str:
        """As in ``--spec-type``: ``draft-mtp`` or ``draft-simple``."""

    @property
    def needs_hidden(self) -> bool:
        """Whether `follow` needs the trunk's hidden rows."""

    def follow(self, seq: int, tokens: Sequence[int], start: int, hidden: NDArray[np.float32] | None) -> None:
        """The trunk evaluated ``tokens`` of ``seq`` from position ``start`` on.

        ``hidden``, shape (len(tokens), n_embd), are the rows that the trunk made of them; the array is the caller's
        again on return. Positions that were followed already are ignored; the work may wait until it is needed.
        """

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        """What may follow each item's tokens, none of which is evaluated yet: ``n`` tokens, or fewer.

        An item with no tokens before its position, or whose rows are gone, still gets a draft, if only a poor one.
        """

    def keep(self, seq: int, n: int) -> None:
        """The trunk holds ``n`` tokens of ``seq`` now: drop what was followed beyond them."""

    def rewind(self, seq: int, n: int) -> None:
        """Drop rows from ``n`` on; `load_state` of position ``n`` may come next."""

    def clear(self, seq: int) -> None:
        """Drop everything of ``seq``."""

    def rows_size(self, first: int, last: int) -> int:
        """Bytes of the block of rows [first, last), 0 if empty."""

    def save_rows(self, seq: int, first: int, last: int) -> Block:
        """Rows [first, last) of ``seq``, or NOTHING where one is missing. The bytes are there after `synchronize`."""

    def load_rows(self, seq: int, first: int, spans: Sequence[Span]) -> None:
        """Append rows to ``seq`` from ``first`` on; where a block is empty or another's, it goes on without them."""

    def state_size(self, seq: int) -> int:
        """Bytes of the state of any position of ``seq``."""

    def save_state(self, seq: int, n: int) -> Block:
        """What drafting at ``n`` needs besides rows, or NOTHING if it is not known. There after `synchronize`."""

    def load_state(self, seq: int, n: int, block: Block) -> None:
        """Go on at ``n`` from such a block; from one that is empty or another's, without."""

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of blocks that are being copied."""

    def synchronize(self) -> None:
        """Wait until every block that was saved is complete."""

    def close(self) -> None:
        """Free what it holds in llama.cpp; its trunk lives on."""


def signature(*names: str) -> bytes:
    """The head of blocks of the draft model that ``names`` tell from all others: file, layout."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=32).digest()
    return digest.ljust(SIGNATURE_BYTES, b"\0")


def is_signed(block: Block, by: bytes) -> bool:
    """Whether ``block`` begins with the signature ``by``; an empty one does not."""
    return block.size > SIGNATURE_BYTES and block[:SIGNATURE_BYTES].tobytes() == by
