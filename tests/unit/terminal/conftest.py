from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import pytest

from pyctl.chat.reply import ReplyDelta
from pyctl.terminal.conversation import ReplyStats


class ScriptedBackend:
    """Gives the prepared replies in order; an exception among the deltas is raised there."""

    def __init__(self, *replies: Sequence[ReplyDelta | ReplyStats | BaseException]) -> None:
        self.replies = list(replies)
        self.seen: list[list[Mapping[str, Any]]] = []
        self.fields: list[Mapping[str, Any]] = []
        self.model = "scripted"
        self.sees = True
        self.closed = 0

    def name(self) -> str:
        return self.model

    def models(self) -> Sequence[str]:
        return ["scripted", "second", "second-best"]

    def use(self, model: str) -> None:
        self.model = model

    def supports_images(self) -> bool:
        return self.sees

    def stream(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any] | None = None
    ) -> Generator[ReplyDelta | ReplyStats, None, None]:
        self.seen.append(list(messages))
        self.fields.append(dict(fields or {}))
        try:
            for item in self.replies.pop(0):
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.closed += 1


STATS = ReplyStats(
    n_cached=1000,
    n_evaluated=20,
    n_predicted=3,
    first_token_ms=120.0,
    tokens_per_second=30.0,
    source="ram",
)


def say(
    *texts: str, reasoning: str = "", stats: ReplyStats = STATS
) -> list[ReplyDelta | ReplyStats | BaseException]:
    """Return a whole reply."""
    return [*([ReplyDelta(reasoning=reasoning)] if reasoning else []), *map(_content, texts), stats]


def _content(text: str) -> ReplyDelta:
    return ReplyDelta(content=text)


class Script:
    """Helpers for tests, as a fixture, because test modules cannot import each other."""

    backend = ScriptedBackend
    say = staticmethod(say)
    stats = STATS


@pytest.fixture
def script() -> type[Script]:
    return Script
