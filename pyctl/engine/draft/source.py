"""What proposes drafts: tokens that may follow in a sequence, to be verified in one evaluation with its next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from pyctl.cache import LiveSequence
from pyctl.prompt import Tokens

__all__ = ["DraftJob", "DraftSource", "RememberingSource"]


class DraftJob(NamedTuple):
    """A reply that can use drafts: ``seq`` holds what is evaluated, ``sure`` tokens come next, one at least.

    Up to ``most`` drafts may follow the last of these. ``key`` is one for each request.
    """

    key: int
    seq: LiveSequence
    sure: tuple[int, ...]
    most: int


class DraftSource(Protocol):
    """Proposes drafts for requests between `begin` and `end`. The engine's thread alone calls it, and waits for it."""

    @property
    def name(self) -> str:
        """As in ``--spec-type``."""

    def begin(self, key: int, prompt: Tokens) -> None:
        """A request with this prompt begins to decode; its first token is not known yet."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[tuple[int, ...]]:
        """What may follow, for each of ``jobs``; nothing where nothing is known. Not asked for every step."""

    def learn(self, key: int, n_drafted: int, n_accepted: int) -> None:
        """Of the last drafts for a request, so many were verified, and the first ``n_accepted`` of them were right.

        Only told to the source whose drafts they were."""

    def end(self, key: int) -> None:
        """The request decodes no more; of no effect for one that never began."""


@runtime_checkable
class RememberingSource(Protocol):
    """A source that keeps texts from one request to the next."""

    @property
    def n_bytes(self) -> int:
        """What is kept takes about so many bytes."""

    def forget(self) -> None:
        """Keep none of it."""
