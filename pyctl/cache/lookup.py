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
    """The result of a lookup: the ``candidates`` in memory, the preferred first, and the matches
    with ``recent`` prompts, None for prompts that no client sent.

    ``ends`` are the batch ends of the prompt, ``facts`` those for the sequence; ``finder`` makes
    candidates of snapshots that come from disk. A request without the cache has no candidates.
    """

    request: CacheRequest
    match: PromptMatch
    ends: Sequence[int]
    facts: PromptFacts
    candidates: Sequence[Candidate] = ()
    finder: ResumeCandidates | None = None
    recent: RecentMatches | None = None

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """The snapshots that may be restored."""
        found = (candidate.snapshot for candidate in self.candidates)
        return tuple(snapshot for snapshot in found if snapshot is not None)


@dataclass(frozen=True)
class CachePlan:
    """The plan for a prompt: end batches and take snapshots at ``cuts``, write those at ``persist``
    to disk.

    The prompt was ``restored`` from these snapshots, which stay locked meanwhile. The user's next
    turn resumes at ``turn``.
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
