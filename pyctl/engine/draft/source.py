"""The interface of draft sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from pyctl.cache.sequence import LiveSequence
from pyctl.prompt import Tokens

__all__ = ["NO_MATCH", "CopyingSource", "DraftJob", "DraftSource", "Match"]


class DraftJob(NamedTuple):
    """A reply that can use drafts: ``seq`` holds the evaluated tokens, then come one or more
    ``sure`` tokens.

    Up to ``maximum`` drafts may follow them. ``key`` identifies the request.
    """

    key: int
    seq: LiveSequence
    sure: tuple[int, ...]
    maximum: int


class Match(NamedTuple):
    """A place of a text: the last ``n`` tokens are as before it, and ``read``, called once in this
    step, returns up to so many that follow it.
    """

    n: int
    read: Callable[[int], tuple[int, ...]]


NO_MATCH = Match(0, lambda n: ())


class DraftSource(Protocol):
    """Copies drafts from a text, for requests between `begin` and `end`. Only the engine's thread
    calls it, and blocks on it.
    """

    @property
    def name(self) -> str:
        """The name in ``--spec-type``."""

    def begin(self, key: int, prompt: Tokens) -> None:
        """Register a request with this prompt, before its first token."""

    def match(self, job: DraftJob, draft: tuple[int, ...] = ()) -> Match:
        """Return the place to copy from, after the sure tokens of ``job`` and a ``draft`` that
        another source proposed for it in this step; `NO_MATCH` if there is none, or if this source
        continues no drafts.
        """

    def end(self, key: int) -> None:
        """Unregister a request; no effect for an unknown one."""


class CopyingSource(DraftSource, Protocol):
    """A source that drafts up to ``maximum`` tokens."""

    @property
    def maximum(self) -> int:
        """The maximum tokens of a draft, 0 for none."""
