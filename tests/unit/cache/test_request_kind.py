"""The kinds of requests, from what is known of each."""

from __future__ import annotations

from itertools import product

import pytest

from pyctl.cache.request_kind import RequestKind, kind_of_request

FACTS = ("is_continued", "is_same_conversation", "is_main", "has_tools")


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({"is_continued"}, RequestKind.APPEND),
        ({"is_same_conversation"}, RequestKind.REWRITE),
        ({"is_main"}, RequestKind.FIRST),
        ({"has_tools"}, RequestKind.SUB_AGENT),
        (set(), RequestKind.SIDE_REQUEST),
    ],
)
def test_one_fact_decides(facts: set[str], kind: RequestKind) -> None:
    assert kind_of_request(**{name: name in facts for name in FACTS}) is kind


def test_an_earlier_fact_comes_before_later_ones() -> None:
    order = [RequestKind.APPEND, RequestKind.REWRITE, RequestKind.FIRST, RequestKind.SUB_AGENT]
    for values in product([False, True], repeat=len(FACTS)):
        kind = kind_of_request(**dict(zip(FACTS, values, strict=True)))
        expected = order[values.index(True)] if any(values) else RequestKind.SIDE_REQUEST
        assert kind is expected
