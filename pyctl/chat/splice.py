"""Puts remembered replies into a rendered conversation: messages are rendered as marks, which are replaced then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pyctl.chat.replay import Replay, Said

__all__ = ["Part", "Splice"]

Part: TypeAlias = str | Said
"""Text as it was rendered, or a reply as it was sampled."""

_MARK = "pyctl-said-before-4c9e-"


class Splice:
    """Replaces messages by what ``replay`` remembers; ``starts`` are the texts of the tokens that begin a message."""

    def __init__(self, replay: Replay, starts: Sequence[str]) -> None:
        self.replay = replay
        self._starts = starts

    def mark(
        self, messages: Sequence[dict[str, Any]], keep_last: bool = False
    ) -> tuple[list[dict[str, Any]], Mapping[str, Said]]:
        """Checked messages with a mark for each that can be replaced, and what belongs in the place of each mark."""
        if self.replay.mode == "off" or not self._starts:
            return list(messages), {}
        marked, replayed = list(messages), {}
        for place, message in enumerate(messages[: len(messages) - keep_last]):
            said = self.replay.find(message, place) if message["role"] == "assistant" else None
            if said is not None:
                mark = f"{_MARK}{place};"
                marked[place], replayed[mark] = {"role": "assistant", "content": mark}, said
        return marked, replayed

    def parts(self, text: str, replayed: Mapping[str, Said]) -> tuple[Part, ...] | None:
        """``text`` with each mark, and the header before it, replaced; None if a mark is not where it should be."""
        if text.count(_MARK) != len(replayed):
            return None
        parts: list[Part] = []
        done = 0
        for mark, said in replayed.items():
            at = text.find(mark, done)
            start = self._last_start(text, done, at) if at >= 0 else -1
            if start < 0 or not _same_header(text[start:at], said.head):
                return None
            parts += [text[done:start] + said.head, said]
            done = at + len(mark)
        return (*parts, text[done:])

    def head(self, text: str, prefill: str) -> str:
        """What the prompt ``text`` has of the message that the reply goes on with, ``prefill`` included; empty if it
        cannot be told.
        """
        if self.replay.mode == "off" or any(start in prefill for start in self._starts):
            return ""
        start = self._last_start(text, 0, len(text))
        return text[start:] if start >= 0 else ""

    def _last_start(self, text: str, low: int, high: int) -> int:
        return max((text.rfind(start, low, high) for start in self._starts), default=-1)


def _same_header(rendered: str, head: str) -> bool:
    """Whether both begin with the same line: the role. What follows may differ, such as an empty reasoning block."""
    line = rendered.partition("\n")[0]
    return head.partition("\n")[0] == line
