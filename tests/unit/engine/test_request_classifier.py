"""The kinds of requests: how each follows from the earlier ones."""

from __future__ import annotations

from pyctl.cache.prompt_comparison import PromptComparison
from pyctl.cache.request_kind import RequestKind
from pyctl.engine.request_classifier import ACTIVE_SECONDS, MAX_HEADS, RequestClassifier
from pyctl.prompt import PromptSections

AGENT = PromptSections(b"tools", b"agent", b"", b"1" * 8)
HELPER = PromptSections(b"other tools", b"helper", b"", b"2" * 8)
TITLE = PromptSections(b"", b"title", b"", b"1" * 8)
CONTINUED = PromptComparison(900, 900, is_continued=True, is_same_conversation=True)
CHANGED = PromptComparison(600, 900, is_same_conversation=True, section="message")
UNRELATED = PromptComparison(20, 900, section="tools")


class Clock:
    """A clock that a test advances."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_session_of_an_agent() -> None:
    """The kinds have the names of the recorded sessions: first, side request, sub-agent, append and
    rewrite.
    """
    classifier = RequestClassifier(Clock())
    kinds = [
        classifier.classify(AGENT, None),
        classifier.classify(TITLE, UNRELATED),
        classifier.classify(AGENT, CONTINUED),
        classifier.classify(HELPER, UNRELATED),
        classifier.classify(HELPER, CONTINUED),
        classifier.classify(HELPER, UNRELATED),
        classifier.classify(AGENT, CHANGED),
        classifier.classify(AGENT, UNRELATED),
    ]
    assert kinds == [
        RequestKind.FIRST,
        RequestKind.SIDE_REQUEST,
        RequestKind.APPEND,
        RequestKind.SUB_AGENT,
        RequestKind.APPEND,
        RequestKind.SUB_AGENT,
        RequestKind.REWRITE,
        RequestKind.FIRST,
    ]


def test_after_a_pause_another_head_is_a_first_request() -> None:
    clock = Clock()
    classifier = RequestClassifier(clock)
    classifier.classify(AGENT, None)
    clock.now = ACTIVE_SECONDS
    assert classifier.classify(HELPER, UNRELATED) is RequestKind.FIRST


def test_an_agent_that_follows_a_request_without_tools_is_a_first_request() -> None:
    """Clients may request a title before the first reply."""
    classifier = RequestClassifier(Clock())
    classifier.classify(TITLE, None)
    assert classifier.classify(AGENT, UNRELATED) is RequestKind.FIRST
    assert classifier.classify(TITLE, UNRELATED) is RequestKind.SIDE_REQUEST


def test_raw_text_appends_rewrites_or_is_first() -> None:
    classifier = RequestClassifier(Clock())
    assert classifier.classify(None, None) is RequestKind.FIRST
    assert classifier.classify(None, CONTINUED) is RequestKind.APPEND
    assert classifier.classify(None, CHANGED) is RequestKind.REWRITE


def test_a_conversation_that_moved_to_another_model_is_a_rewrite() -> None:
    moved = PromptComparison(0, 900, section="model")
    assert RequestClassifier(Clock()).classify(AGENT, moved) is RequestKind.REWRITE


def test_the_oldest_heads_are_forgotten() -> None:
    """A client that changes its system message in each request takes no memory."""
    classifier = RequestClassifier(Clock())
    classifier.classify(AGENT, None)
    for number in range(MAX_HEADS):
        head = PromptSections(b"", str(number).encode(), b"", b"1" * 8)
        classifier.classify(head, UNRELATED)
    assert classifier.classify(HELPER, UNRELATED) is RequestKind.FIRST
