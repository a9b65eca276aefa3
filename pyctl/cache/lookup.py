"""The facts that a request carries through the cache: its lookup, then its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyctl.cache.candidates import Candidate, ResumeCandidates
from pyctl.cache.ports import CacheRequest, Store
from pyctl.cache.recent import RecentMatches
from pyctl.cache.snapshot import PromptFacts, PromptMatch, Snapshot

__all__ = ["CacheLookup", "CachePlan", "may_use_disk"]


@dataclass(frozen=True, eq=False)
class CacheLookup:
    """The result of a lookup.

    Attributes:
        request: The request.
        match: Its prompt, for comparisons.
        batch_ends: The batch ends of the prompt.
        facts: The facts that the sequence gets.
        candidates: The candidates in memory, the preferred first; none without the cache.
        finder: The maker of candidates from snapshots on disk.
        recent: The matches with recent prompts, None for a prompt that no client sent.
    """

    request: CacheRequest
    match: PromptMatch
    batch_ends: Sequence[int]
    facts: PromptFacts
    candidates: Sequence[Candidate] = ()
    finder: ResumeCandidates | None = None
    recent: RecentMatches | None = None

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """The snapshots that may be restored."""
        snapshots = (candidate.snapshot for candidate in self.candidates)
        return tuple(snapshot for snapshot in snapshots if snapshot is not None)


@dataclass(frozen=True)
class CachePlan:
    """The plan for the rest of a prompt.

    Attributes:
        match: The prompt, for comparisons.
        cuts: The positions at which batches end and snapshots are taken.
        persist: The positions whose snapshots are written to disk.
        restored: The snapshots that the prompt was restored from, which saving must not evict.
        turn: The position at which the user's next turn resumes.
    """

    match: PromptMatch
    cuts: tuple[int, ...] = ()
    persist: tuple[int, ...] = ()
    restored: tuple[Snapshot, ...] = ()
    turn: int = 0


def may_use_disk(request: CacheRequest, disk: Store | None) -> bool:
    """Return whether the prompt of ``request`` may be read from and written to ``disk``."""
    if disk is None or not request.cache_prompt:
        return False
    policy = request.disk_policy or disk.policy
    return policy.kind != "off"
