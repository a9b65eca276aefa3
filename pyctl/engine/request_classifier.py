"""The kinds of a model's requests, inferred from their prompts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from pyctl.cache.prompt_comparison import PromptComparison
from pyctl.cache.request_kind import RequestKind, kind_of_request
from pyctl.engine.engine_settings import Clock
from pyctl.prompt import PromptSections
from pyctl.settings.limit import limit

__all__ = ["RequestClassifier"]

ACTIVE_SECONDS = 600.0
"""A conversation is active for this long after its last request: people read, and tests run."""

MAX_HEADS = limit(
    64, "heads of prompts from which kinds of requests follow", "the oldest are forgotten", "memory"
)


@dataclass
class _Head:
    """The tools and the system message of conversations.

    Attributes:
        has_tools: Whether it has tools.
        is_main: Whether its conversations are neither a sub-agent's nor side requests.
        used: When it was last used, in seconds of the clock.
    """

    has_tools: bool
    is_main: bool
    used: float


class RequestClassifier:
    """The kinds of a model's requests, in the order of their arrival.

    A prompt does not name its conversation, so the kind is inferred: from a remembered prompt that
    it continues or changes, otherwise from the heads of the conversations that are active. A
    compaction that also replaces the first message is a first request. ``clock`` gives monotonic
    seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heads: OrderedDict[bytes, _Head] = OrderedDict()

    def classify(
        self, sections: PromptSections | None, comparison: PromptComparison | None
    ) -> RequestKind:
        """Return the kind of a request; ``comparison`` is with the nearest remembered prompt."""
        is_same = comparison is not None and (
            comparison.is_same_conversation or comparison.section == "model"
        )
        kind = kind_of_request(
            is_continued=comparison is not None and comparison.is_continued,
            is_same_conversation=is_same,
            is_main=sections is None or self._opens_main(sections),
            has_tools=sections is not None and bool(sections.tools),
        )
        if sections is not None:
            self._record(sections, kind)
        return kind

    def _opens_main(self, sections: PromptSections) -> bool:
        """Return whether a request that opens a conversation opens a main one: with the head of an
        active conversation, or without any conversation beside it.
        """
        now = self._clock()
        active = {
            digest: head
            for digest, head in self._heads.items()
            if head.is_main and now - head.used < ACTIVE_SECONDS
        }
        has_agent = any(head.has_tools for head in active.values())
        if sections.tools:
            return sections.head in active or not has_agent
        return not has_agent and (sections.head in active or not active)

    def _record(self, sections: PromptSections, kind: RequestKind) -> None:
        """Record the head of a request, whose role the request that opened with it determined."""
        head = self._heads.pop(sections.head, None)
        opens_other = kind in (RequestKind.SUB_AGENT, RequestKind.SIDE_REQUEST)
        is_main = not opens_other
        if head is not None and kind in (RequestKind.APPEND, RequestKind.REWRITE):
            is_main = head.is_main
        self._heads[sections.head] = _Head(bool(sections.tools), is_main, self._clock())
        if len(self._heads) > MAX_HEADS:
            self._heads.popitem(last=False)
