"""The explanation of the tokens that a request evaluated again."""

from __future__ import annotations

from pyctl.cache.prompt_comparison import PromptComparison
from pyctl.server.cache_advice import explain


def test_a_changed_message_is_named_with_its_cost() -> None:
    changed = PromptComparison(
        600, 900, is_same_conversation=True, section="message", message=3, n_messages=12
    )
    explanation = explain(changed, 950, 600)
    assert explanation is not None
    assert explanation.text == (
        "change in message 3 of 12: 300 tokens evaluated again "
        "(append messages instead of changing earlier ones)"
    )
    assert explanation.as_json() == {
        "difference": "message 3 of 12",
        "changed": 300,
        "lost": 0,
        "remedy": "append messages instead of changing earlier ones",
    }


def test_an_evicted_snapshot_is_no_fault_of_the_client() -> None:
    continued = PromptComparison(900, 900, is_continued=True, is_same_conversation=True)
    explanation = explain(continued, 1200, 0)
    assert explanation is not None
    assert explanation.n_changed == 0
    assert explanation.n_lost == 900
    assert "--cache-ram" in explanation.text


def test_a_conversation_that_moved_costs_its_whole_prompt() -> None:
    explanation = explain(PromptComparison(0, 900, section="model"), 900, 100)
    assert explanation is not None
    assert explanation.n_changed == 800
    assert explanation.text.startswith("change in model")


def test_another_conversation_and_small_losses_need_no_explanation() -> None:
    assert explain(None, 900, 0) is None
    unrelated = PromptComparison(20, 900, section="system")
    assert explain(unrelated, 900, 0) is None
    continued = PromptComparison(900, 900, is_continued=True, is_same_conversation=True)
    assert explain(continued, 1200, 800) is None
