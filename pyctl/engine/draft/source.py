"""The interface of draft sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from pyctl.cache import LiveSequence
from pyctl.prompt import Tokens

__all__ = ["ContinuingSource", "DraftJob", "DraftSource", "RememberingSource", "TextSource"]


class DraftJob(NamedTuple):
    """A reply that can use drafts: ``seq`` holds the evaluated tokens, then come one or more ``sure`` tokens.

    Up to ``most`` drafts may follow them. ``key`` identifies the request.
    """

    key: int
    seq: LiveSequence
    sure: tuple[int, ...]
    most: int


class DraftSource(Protocol):
    """Proposes drafts for requests between `begin` and `end`. Only the engine's thread calls it, and blocks on it."""

    @property
    def name(self) -> str:
        """The name in ``--spec-type``."""

    def begin(self, key: int, prompt: Tokens) -> None:
        """Register a request with this prompt, before its first token."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[tuple[int, ...]]:
        """Return drafts for each of ``jobs``, empty if none are known. Not called in every step."""

    def learn(self, key: int, n_drafted: int, n_accepted: int) -> None:
        """Record that of this source's last drafts for a request ``n_drafted`` were verified, the first ``n_accepted``
        with success."""

    def end(self, key: int) -> None:
        """Unregister a request; no effect for an unknown one."""


class TextSource(DraftSource, Protocol):
    """A source that copies its drafts from a text."""

    def matched(self, job: DraftJob, draft: tuple[int, ...] = ()) -> int:
        """Return how many tokens, up to the end of ``draft``, are as before the place that is copied; 0: there is
        none."""


@runtime_checkable
class ContinuingSource(TextSource, Protocol):
    """A source that also continues drafts of other sources."""

    def extend(self, job: DraftJob, draft: tuple[int, ...], n: int) -> tuple[int, ...]:
        """Return up to ``n`` tokens that follow ``draft``, which another source proposed for ``job`` in this step."""


@runtime_checkable
class RememberingSource(Protocol):
    """A source that keeps texts across requests."""

    @property
    def n_bytes(self) -> int:
        """Approximate bytes of the kept texts."""

    def forget(self) -> None:
        """Drop all kept texts."""
