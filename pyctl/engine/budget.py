"""How long a reply may reason: counts the tokens of a reasoning block and forces its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyctl.engine.stream import ends_within_character

__all__ = ["Budget", "ReasoningLimit"]


@dataclass(frozen=True)
class ReasoningLimit:
    """At most ``n_tokens`` from a ``start`` on until one of ``ends``; then ``forced`` follows, whatever the model says.

    All are token ids. ``read`` is what the prompt holds already of the reply, from the reasoning's start on.
    """

    n_tokens: int
    start: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]
    forced: tuple[int, ...]
    read: tuple[int, ...] = ()


class Budget:
    """Ask `next` before each token, tell `saw` after it. A reply that opens another block gets the limit anew.

    The end is never forced within a character; ``piece`` gives the bytes of a token.
    """

    def __init__(self, limit: ReasoningLimit, piece: Callable[[int], bytes]) -> None:
        self._limit = limit
        self._piece = piece
        self._left = -1  # tokens until the end is forced, -1 outside of a block
        self._forced: list[int] = []
        self._last: list[int] = []
        for token in limit.read:
            self.saw(token)

    def next(self) -> int | None:
        """The token that has to come now, None for any."""
        if self._left == 0 and not self._forced and not ends_within_character(self._bytes()):
            self._forced = list(self._limit.forced)
        return self._forced[0] if self._forced else None

    def saw(self, token: int) -> None:
        """``token`` came."""
        self._last = [*self._last[-self._window() :], token]
        if self._forced:
            del self._forced[0]
            if not self._forced:
                self._left = -1
        elif self._left < 0:
            if self._ends_in(self._limit.start):
                self._left, self._last = self._limit.n_tokens, []
        elif any(self._ends_in(end) for end in self._limit.ends):
            self._left = -1
        else:
            self._left = max(self._left - 1, 0)

    def _window(self) -> int:
        return max(len(self._limit.start), *map(len, self._limit.ends), 4)

    def _ends_in(self, tokens: Sequence[int]) -> bool:
        return bool(tokens) and tuple(self._last[-len(tokens) :]) == tuple(tokens)

    def _bytes(self) -> bytes:
        return b"".join(self._piece(token) for token in self._last)
