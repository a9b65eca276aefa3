"""A disk of prefixes alone, for tests of what is read, fetched and written, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyctl.cache.costs import Costs
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.reads import Reading
from pyctl.cache.recent import RecentMatches, RecentPrompts
from pyctl.cache.snapshot import Block, Prefix, PromptMatch, Segment, Snapshot


class FakeDisk:
    """Has prefixes of the lengths ``stored``, and of ``remote`` in so many seconds; every read
    finds that the files have gone.

    ``needed`` are the segments whose rows a write waits for; ``n_evicted`` evicted snapshots wait
    to be written, and can be dropped.
    """

    def __init__(self, stored: Sequence[int] = (), remote: dict[int, float] | None = None) -> None:
        self.stored = stored
        self.remote = remote or {}
        self.policy = DiskPolicy.parse("full")
        self.costs = Costs()
        self.recent = RecentPrompts()
        self.interim_seconds = 0.0
        self.needed: list[Segment] = []
        self.served: list[Sequence[Block]] = []
        self.n_evicted = 0
        self.opened: list[tuple[int, int]] = []
        self.fetched: list[Prefix] = []
        self.written: list[tuple[Snapshot, bool]] = []

    def find(self, prompt: PromptMatch, limit: int) -> list[Prefix]:
        return [prompt.prefix(n) for n in sorted(self.stored, reverse=True) if n <= limit]

    def find_remote(self, prompt: PromptMatch, limit: int) -> list[tuple[Prefix, float]]:
        return [(prompt.prefix(n), seconds) for n, seconds in self.remote.items() if n <= limit]

    def fetch(self, prefix: Prefix) -> Any:
        self.fetched.append(prefix)
        return self

    def open(
        self, prefix: Prefix, prompt: PromptMatch, base: Snapshot | None, max_bytes: int | None
    ) -> Reading[None]:
        self.opened.append((prefix.n, base.n if base is not None else 0))
        yield from ()

    def select(
        self, matches: RecentMatches, start: int, policy: DiskPolicy | None = None
    ) -> tuple[int, ...]:
        return ()

    def write(self, snapshot: Snapshot, *, is_last: bool = False) -> None:
        self.written.append((snapshot, is_last))

    def evict(self, snapshot: Snapshot, worth: float, rows_of: Any) -> None:
        pass

    @property
    def awaits_rows(self) -> bool:
        return bool(self.needed)

    def supply_rows(self, rows_of: Any) -> None:
        self.served.append(rows_of(self.needed))
        self.needed = []

    def drop_lowest_value(self) -> bool:
        self.n_evicted -= self.n_evicted > 0
        return self.n_evicted > 0

    def close(self, flush_copies: Any) -> bool:
        flush_copies()
        return True
