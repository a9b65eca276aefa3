"""The model that the last request of a conversation went to."""

from __future__ import annotations

from pyctl.prompt import PromptSections
from pyctl.server.model_history import MAX_CONVERSATIONS, ModelHistory


def conversation(number: int) -> PromptSections:
    return PromptSections(b"", b"", b"", number.to_bytes(8))


def test_a_conversation_that_changes_its_model_leaves_the_other_one() -> None:
    history = ModelHistory()
    assert history.record(conversation(1), "a") == ""
    assert history.record(conversation(1), "a") == ""
    assert history.record(conversation(1), "b") == "a"
    assert history.record(conversation(2), "a") == ""
    assert history.record(None, "b") == ""


def test_the_oldest_conversations_are_forgotten() -> None:
    history = ModelHistory()
    for number in range(MAX_CONVERSATIONS + 1):
        history.record(conversation(number), "a")
    assert history.record(conversation(0), "b") == ""
    assert history.record(conversation(MAX_CONVERSATIONS), "b") == "a"
