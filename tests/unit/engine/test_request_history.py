"""The latest requests of a model, by kind."""

from __future__ import annotations

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.prompt_comparison import PromptComparison
from pyctl.cache.request_kind import RequestKind
from pyctl.engine.request import Request, Timings
from pyctl.engine.request_history import MAX_REQUESTS, RequestHistory
from pyctl.prompt import Prompt

PROMPT = Prompt.from_ids(range(300))
TIMINGS = Timings(100, 200, 1.0, 5, 1.0, 1.0)


def test_a_request_has_its_kind_and_counts() -> None:
    history = RequestHistory(lambda: 5.0)
    stats = RequestStats(300, "ram", 100, 200)
    history.classify(Request(PROMPT), stats)
    history.add(TIMINGS, stats)
    ((age, served),) = history.within_hour()
    assert age == 0
    assert served.kind is RequestKind.FIRST
    assert served.source == "ram"
    assert history.n_by_kind == {RequestKind.FIRST: 1}


def test_a_request_that_is_not_cached_has_no_kind() -> None:
    history = RequestHistory(lambda: 5.0)
    stats = RequestStats(300)
    history.classify(Request(PROMPT, cache_prompt=False), stats)
    history.add(TIMINGS, stats)
    assert history.within_hour()[0][1].kind is None
    assert not history.n_by_kind


def test_a_conversation_from_another_model_is_explained_by_it() -> None:
    history = RequestHistory(lambda: 5.0)
    stats = RequestStats(300, comparison=PromptComparison(20, 900, section="text"))
    history.classify(Request(PROMPT, model_before="other"), stats)
    assert stats.comparison is not None
    assert stats.comparison.section == "model"
    assert stats.kind is RequestKind.REWRITE


def test_a_conversation_that_returns_to_its_model_is_compared_with_itself() -> None:
    history = RequestHistory(lambda: 5.0)
    own = PromptComparison(200, 200, is_continued=True, is_same_conversation=True)
    stats = RequestStats(300, comparison=own)
    history.classify(Request(PROMPT, model_before="other"), stats)
    assert stats.comparison is own
    assert stats.kind is RequestKind.APPEND


def test_the_history_is_bounded() -> None:
    history = RequestHistory(lambda: 5.0)
    for _ in range(MAX_REQUESTS + 3):
        history.add(TIMINGS, RequestStats(300))
    assert len(history.within_hour()) == MAX_REQUESTS
