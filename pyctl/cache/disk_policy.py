"""Disk policies: ``off``, ``full``, ``auto[:N]`` or a fixed number of tokens, and the spill.

A policy compares tokens and counts messages; it depends neither on stored files nor on the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import msgspec

from pyctl.cache.recent import ClosestPrompt, RecentMatches, last_boundary
from pyctl.errors import RequestError
from pyctl.prompt import Prompt

__all__ = ["MAX_COUNT", "DiskPolicy", "Kind", "Selection"]

Kind: TypeAlias = Literal["off", "full", "auto", "fixed", "spill"]

SPILL = "spill"
"""The word for writing snapshots that RAM evicts."""

MAX_COUNT = 1_000_000
"""The largest window, in prompts, and the largest fixed prefix, in tokens."""

PAST_START = 2
"""Prefixes to persist of one prompt, past the place where it was restored."""

SCOPE_TEXT = "prefix_cache.scope must be off, full, auto, auto:<window>, or a positive token count"
WINDOW_TEXT = "prefix_cache.window must be a positive integer"

_WORDS: Mapping[str, Kind] = {
    "off": "off",
    "none": "off",
    "disabled": "off",
    "full": "full",
    "full-prefix": "full",
    "auto": "auto",
}


class Selection(msgspec.Struct, frozen=True):
    """The choice of a policy for one prompt, in tokens from its start.

    Attributes:
        eligible_len: The scope before the minimum length is applied.
        selected: The scope, 0 for none.
        positions: The prefixes to persist, ascending; at most two are past the restored position.
            Those at or before it cost no evaluation, but need a snapshot that is still in memory.
    """

    eligible_len: int = 0
    selected: int = 0
    positions: tuple[int, ...] = ()


@dataclass(frozen=True)
class DiskPolicy:
    """The choice of prefixes to persist.

    ``window`` counts prompts (``auto``), ``tokens`` is the length of ``fixed``. The kinds are:

    * ``off``: none.
    * ``full``: the deepest boundary, where the next turn of a conversation resumes. Past
      ``cold_max`` tokens also the deepest boundary within them, so that a long prompt leaves
      something to those that share only its beginning.
    * ``auto``: the scope is the longest prefix shared with one of the newest ``window`` prompts,
      aligned down to a boundary. It is persisted, but alone it would leave two holes. Prompts
      differ at ever shallower places, each a miss until the shallowest has been seen: so the first
      boundary, the system and tools head, is persisted as soon as it is shared. And the part that a
      conversation shares with its last turn is one turn old: so the prompt is expected to be left
      as many boundaries before its end as it left the nearest one, or as that one had left its own,
      and the deeper of these places is persisted. For a conversation that is the generation header;
      for a reminder or a tool result that is replaced in each turn, the place before it; for a
      dynamic tail, the scope itself. If all three are still to be evaluated, the scope waits for
      another request.
    * ``fixed``: the first ``tokens`` tokens of every longer prompt, wherever messages start.
    * ``spill``: none at once.

    A prompt without boundaries is cut at any token, and its end stands for its last boundary.

    With ``spill``, whatever the kind, evicted snapshots are written if they are worth that.
    """

    kind: Kind
    window: int = 30
    tokens: int = 0
    spill: bool = False

    @classmethod
    def from_flag(cls, text: str) -> DiskPolicy:
        """Return the policy of a server's setting: a form of `parse`, alone or before ``,spill``,
        or ``spill`` alone. Raises RequestError for ``off,spill``.
        """
        *kinds, word = text.lower().split(",")
        if word != SPILL or len(kinds) > 1:
            return cls.parse(text)
        policy = replace(cls.parse(kinds[0]) if kinds else cls("spill"), spill=True)
        if policy.kind == "off":
            raise RequestError(SCOPE_TEXT)
        return policy

    @classmethod
    def parse(cls, text: str) -> DiskPolicy:
        """Return the policy of ``off|none|disabled|full|full-prefix|auto|auto:N|N``, in any case.
        Raises RequestError for anything else.
        """
        name, colon, window = text.lower().partition(":")
        if not colon and name in _WORDS:
            return cls(_WORDS[name])
        if colon and name == "auto" and (n := _count(window)):
            return cls("auto", n)
        if not colon and (n := _count(name)):
            return cls("fixed", tokens=n)
        raise RequestError(SCOPE_TEXT)

    @classmethod
    def from_request(cls, value: object, default: DiskPolicy) -> DiskPolicy:
        """Return the policy of a request whose field ``prefix_cache`` is ``value``. ``default``
        applies to None, and to the keys that ``value`` leaves out.

        A window changes ``auto`` only, and only ``off`` changes whether evicted snapshots are
        written. Raises RequestError if a value is not of the allowed form.
        """
        if value is None:
            return default
        if not isinstance(value, Mapping):
            raise RequestError("prefix_cache must be an object with scope, window or both")
        scope = value.get("scope")
        window = value.get("window")
        policy = default
        if isinstance(scope, str) or type(scope) is int:
            policy = cls.parse(str(scope))
            policy = replace(policy, spill=default.spill and policy.kind != "off")
        elif scope is not None:
            raise RequestError(SCOPE_TEXT)
        if window is None:
            return policy
        if type(window) is not int or not 0 < window <= MAX_COUNT:
            raise RequestError(WINDOW_TEXT)
        return policy.with_window(window)

    def with_window(self, n: int) -> DiskPolicy:
        """Return this policy, comparing with the newest ``n`` prompts; only ``auto`` compares."""
        return replace(self, window=n) if self.kind == "auto" else self

    @property
    def name(self) -> str:
        """The text for users: ``off``, ``full``, ``auto:N``, ``fixed:N`` or ``spill``, or one of
        these and ``,spill``.
        """
        name = {"auto": f"auto:{self.window}", "fixed": f"fixed:{self.tokens}"}.get(
            self.kind, self.kind
        )
        return f"{name},{SPILL}" if self.spill and self.kind != "spill" else name

    def select(
        self, matches: RecentMatches, *, min_tokens: int, cold_max: int, start: int = 0
    ) -> Selection:
        """Choose the prefixes of ``matches.prompt`` to persist, by the recent prompts that it was
        compared with.

        None is shorter than ``min_tokens``; ``start`` is the restored position. ``cold_max`` is
        only for ``full``.
        """
        prompt = matches.prompt
        if self.kind == "fixed":
            safe = self.tokens if len(prompt) > self.tokens else 0
            targets = {safe}
        elif self.kind == "full":
            safe = prompt.end
            targets = {safe, last_boundary(prompt, cold_max) if prompt.boundaries else safe}
        elif self.kind == "auto":
            nearest = matches.closest(self.window, for_disk=True)
            safe = nearest.aligned_len if nearest else 0
            targets = _expected(prompt, nearest) if nearest and safe else set()
        else:
            return Selection()
        minimum = max(min_tokens, 1)
        positions = sorted(n for n in targets if n >= minimum)
        ahead = [n for n in positions if n > start]
        if len(ahead) > PAST_START:
            positions.remove(ahead[1])
        return Selection(safe, safe if safe >= minimum else 0, tuple(positions))


def _count(text: str) -> int:
    """Return the number in [1, MAX_COUNT] that ``text`` is, or 0."""
    n = int(text) if re.fullmatch("[0-9]{1,9}", text) else 0
    return n if n <= MAX_COUNT else 0


def _expected(prompt: Prompt, nearest: ClosestPrompt) -> set[int]:
    """Return the positions where later prompts may leave ``prompt``: the head, the scope, and the
    deepest boundary that the last departures predict (see `DiskPolicy`).
    """
    stops = prompt.boundaries or (len(prompt),)
    places = {
        stops[-left]
        for left in (nearest.boundaries_remaining, nearest.recent.boundaries_remaining)
        if 0 < left <= len(stops)
    }
    head = prompt.boundaries[0] if prompt.boundaries else nearest.aligned_len
    return {head, nearest.aligned_len, max({nearest.aligned_len, *places})}
