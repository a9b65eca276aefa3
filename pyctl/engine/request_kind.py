"""The kinds of requests: the ways in which a request follows from earlier ones."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from pyctl.cache.prompt_comparison import PromptComparison
from pyctl.engine.engine_settings import Clock
from pyctl.prompt import PromptSections
from pyctl.settings.limit import limit

__all__ = ["RequestClassifier", "RequestKind"]

ACTIVE_SECONDS = 600.0
"""A conversation is active for this long after its last request: people read, and tests run."""

MAX_HEADS = limit(
    64, "heads of prompts from which kinds of requests follow", "the oldest are forgotten", "memory"
)


class RequestKind(Enum):
    """The way in which a request follows from earlier ones.

    An append continues an earlier prompt; a rewrite changes an earlier prompt of its conversation.
    The others open a conversation: a sub-agent has other tools or another system message than the
    active conversation; a side request, such as one for a title, has no tools either.
    """

    FIRST = "first"
    SUB_AGENT = "sub-agent"
    SIDE_REQUEST = "side request"
    APPEND = "append"
    REWRITE = "rewrite"


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
        kind = _follow_up(comparison)
        if sections is None:
            return kind or RequestKind.FIRST
        kind = kind or self._opening(sections)
        self._record(sections, kind)
        return kind

    def _opening(self, sections: PromptSections) -> RequestKind:
        """Return the kind of a request that opens a conversation."""
        now = self._clock()
        active = {
            digest: head
            for digest, head in self._heads.items()
            if head.is_main and now - head.used < ACTIVE_SECONDS
        }
        has_agent = any(head.has_tools for head in active.values())
        if sections.tools:
            is_own = sections.head in active or not has_agent
            return RequestKind.FIRST if is_own else RequestKind.SUB_AGENT
        if has_agent:
            return RequestKind.SIDE_REQUEST
        is_own = sections.head in active or not active
        return RequestKind.FIRST if is_own else RequestKind.SIDE_REQUEST

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


def _follow_up(comparison: PromptComparison | None) -> RequestKind | None:
    """Return the kind of a request that follows an earlier prompt; None if it opens anew."""
    if comparison is None:
        return None
    if comparison.is_continued:
        return RequestKind.APPEND
    if comparison.is_same_conversation or comparison.section == "model":
        return RequestKind.REWRITE
    return None
