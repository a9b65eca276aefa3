"""The prompts of late: where a new one leaves them, and so where a branch point is worth a snapshot."""

from __future__ import annotations

from collections import deque

from pyctl.prompt import Prompt, Tokens, common_prefix

__all__ = ["RecentPrompts"]


class RecentPrompts:
    """The newest ``capacity`` distinct prompts. A prompt that another one continues makes room for it."""

    def __init__(self, capacity: int = 64) -> None:
        self._prompts: deque[Prompt] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompt: Prompt) -> None:
        """Remember ``prompt`` as the newest."""
        for known in self._prompts:
            if common_prefix(known.tokens, prompt.tokens) >= known.end:
                self._prompts.remove(known)
                break
        self._prompts.append(prompt)

    def nearest(self, tokens: Tokens) -> tuple[Prompt | None, int]:
        """The prompt that shares the most leading tokens with ``tokens``, the newest of equals, and how many."""
        best: tuple[Prompt | None, int] = (None, 0)
        for known in reversed(self._prompts):
            shared = common_prefix(known.tokens, tokens)
            if shared > best[1]:
                best = known, shared
        return best
