"""Recent prompts, and the length that a new prompt shares with each of them."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import msgspec
import numpy as np

from pyctl.prompt import Prompt, Tokens, common_prefix
from pyctl.settings.limit import limit

__all__ = ["ClosestPrompt", "RecentMatches", "RecentPrompt", "RecentPrompts", "last_boundary"]


@dataclass(frozen=True, eq=False)
class RecentPrompt:
    """A recent prompt.

    Attributes:
        prompt: The prompt.
        boundaries_remaining: How many boundaries before the end of the prompt nearest to it, it
            left that one; 0 if unknown.
        for_disk: Whether its request wanted it on disk. Otherwise it is never saved, and no policy
            compares with it.
    """

    prompt: Prompt
    boundaries_remaining: int = 0
    for_disk: bool = True


class ClosestPrompt(msgspec.Struct, frozen=True):
    """The recent prompt that shares the most with a new one.

    Attributes:
        recent: The recent prompt.
        common: The number of leading tokens that both have.
        aligned_len: The last boundary of the new prompt within ``common``.
        boundaries_remaining: How many boundaries before the recent prompt's end the new one leaves
            it, 0 if it has no boundary to count.
    """

    recent: RecentPrompt
    common: int
    aligned_len: int
    boundaries_remaining: int

    @property
    def is_continued(self) -> bool:
        """True if the new prompt has all of this one, up to its generation header."""
        return self.common >= self.recent.prompt.end


class RecentMatches(msgspec.Struct, frozen=True):
    """The comparison of a prompt with recent ones.

    Attributes:
        prompt: The new prompt.
        recent: The recent prompts, newest first.
        shared: How many leading tokens the prompt shares with each of them.
    """

    prompt: Prompt
    recent: Sequence[RecentPrompt] = ()
    shared: Sequence[int] = ()

    @property
    def has_whole(self) -> bool:
        """True if an equal prompt came before."""
        n = len(self.prompt)
        return any(
            n == n_shared == len(each.prompt)
            for each, n_shared in zip(self.recent, self.shared, strict=True)
        )

    def closest(self, window: int | None = None, for_disk: bool = False) -> ClosestPrompt | None:
        """Return the recent prompt that shares the most, the newest of equals; None if nothing is
        shared.

        Only the newest ``window`` count, and with ``for_disk`` only those that may be on disk.
        """
        pairs = zip(self.recent, self.shared, strict=True)
        best: RecentPrompt | None = None
        common = 0
        for recent, n in islice(
            (pair for pair in pairs if pair[0].for_disk or not for_disk), window
        ):
            if n > common:
                best = recent
                common = n
        if best is None:
            return None
        aligned_len = last_boundary(self.prompt, common)
        boundaries = best.prompt.boundaries
        boundaries_remaining = (
            len(boundaries) - bisect.bisect_left(boundaries, aligned_len)
            if boundaries
            else int(common == len(best.prompt))
        )
        return ClosestPrompt(best, common, aligned_len, boundaries_remaining)


def last_boundary(prompt: Prompt, n: int) -> int:
    """Return the deepest boundary at or before ``n``, or 0; ``n`` itself if there are no
    boundaries.
    """
    if not prompt.boundaries:
        return n
    n_before = bisect.bisect_right(prompt.boundaries, n)
    return prompt.boundaries[n_before - 1] if n_before else 0


_BOUNDARY_BYTES = 36
"""Bytes of a number in a tuple."""

_SECTION_OVERHEAD = 350
"""Approximate bytes of the digests of a prompt's sections without its messages."""

_ENTRY_BYTES = 1500
"""Approximate bytes of the containers around a prompt, and of its part in the table of shared
tokens.
"""

_MAX_TOKENS = limit(2**22, "tokens of recent prompts", "the oldest are forgotten", "memory")


class RecentPrompts:
    """The newest prompts: at most ``capacity`` of them and ``max_tokens`` tokens in all (4 bytes
    each).

    A prompt replaces the older one that it continues, so a window of N covers N conversations, not
    N turns of one. One thread changes the list; any thread may read `newest_first`, which is
    immutable. ``listener`` is called with the tokens of each added prompt.
    """

    def __init__(self, capacity: int = 256, max_tokens: int = _MAX_TOKENS) -> None:
        self._capacity = capacity
        self._max_tokens = max_tokens
        self.listener: Callable[[Tokens], None] | None = None
        self._recent: tuple[RecentPrompt, ...] = ()
        # Lengths that newer prompts share with older ones were counted at their arrival; most
        # comparisons follow from them.
        self._all_places = frozenset(range(capacity + 1))
        self._places: tuple[int, ...] = ()
        self._shared = np.zeros((capacity + 1, capacity + 1), np.int32)

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def n_bytes(self) -> int:
        """Approximate bytes of all remembered prompts."""
        prompts = [recent.prompt for recent in self._recent]
        return sum(
            prompt.tokens.nbytes
            + _BOUNDARY_BYTES * len(prompt.boundaries)
            + (_SECTION_OVERHEAD + len(prompt.sections.messages) if prompt.sections else 0)
            + _ENTRY_BYTES
            for prompt in prompts
        )

    def newest_first(self) -> tuple[RecentPrompt, ...]:
        """Return every remembered prompt."""
        return self._recent

    def compare(self, prompt: Prompt) -> RecentMatches:
        """Compare ``prompt`` with all; costs about one comparison, however many there are."""
        shared: list[int] = []
        maximum = -1
        row = [0]
        for place, recent in zip(self._places, self._recent, strict=True):
            # The best so far has ``maximum`` in common with the prompt. Prompts that differ from it
            # earlier are known.
            if maximum >= 0 and row[place] != maximum:
                shared.append(min(row[place], maximum))
                continue
            n = _common_from(max(maximum, 0), recent.prompt.tokens, prompt.tokens)
            shared.append(n)
            if n > maximum:
                maximum = n
                row = self._shared[place].tolist()
        return RecentMatches(prompt, self._recent, shared)

    def add(
        self,
        prompt: Prompt,
        matches: RecentMatches | None = None,
        for_disk: bool = True,
        *,
        is_heard: bool = True,
    ) -> None:
        """Remember ``prompt`` as the newest; ``listener`` gets it if it ``is_heard``.

        ``matches``, if they are at hand, come from `compare`.
        """
        if matches is None or matches.recent is not self._recent:
            matches = self.compare(prompt)
        nearest = matches.closest(for_disk=for_disk)
        going = set()
        for other in (nearest, matches.closest()):
            if other is not None and other.is_continued and (for_disk or not other.recent.for_disk):
                going.add(other.recent)
        if prompt.pictures:  # whose files are large, and which are compared by their tokens
            prompt = replace(prompt, pictures=())
        self._insert(
            RecentPrompt(prompt, nearest.boundaries_remaining if nearest else 0, for_disk),
            matches,
            going,
        )
        if self.listener is not None and is_heard:
            self.listener(prompt.tokens)

    def load(self, newest_first: Iterable[RecentPrompt]) -> None:
        """Start with ``newest_first``, as far as there is room."""
        self._recent = self._places = ()
        loaded: list[RecentPrompt] = []
        n_tokens = 0
        for recent in islice(newest_first, self._capacity):
            n_tokens += len(recent.prompt)
            if n_tokens > self._max_tokens:
                break
            loaded.append(recent)
        for recent in reversed(loaded):
            self._insert(recent, self.compare(recent.prompt), set())

    def _insert(
        self, recent: RecentPrompt, matches: RecentMatches, going: set[RecentPrompt]
    ) -> None:
        free = min(self._all_places - set(self._places))
        self._shared[free, list(self._places)] = matches.shared
        still_recent: list[tuple[RecentPrompt, int]] = []
        n_tokens = 0
        for one, place in [(recent, free), *zip(self._recent, self._places, strict=True)]:
            if one in going:
                continue
            n_tokens += len(one.prompt)
            if n_tokens > self._max_tokens or len(still_recent) == self._capacity:
                break
            still_recent.append((one, place))
        self._recent = tuple(one for one, _ in still_recent)
        self._places = tuple(place for _, place in still_recent)


def _common_from(n: int, a: Tokens, b: Tokens) -> int:
    """Return how many leading tokens two prompts share, of which at least ``n`` are known to be
    equal.
    """
    if n >= a.size or n >= b.size or a[n] != b[n]:
        return n
    return n + common_prefix(a[n:], b[n:])
