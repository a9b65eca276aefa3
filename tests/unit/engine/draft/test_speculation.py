"""Which speculation a backend allows, and the reason for none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pyctl.engine.backend import BackendFacts
from pyctl.engine.draft.ngram import NgramSource
from pyctl.engine.draft.speculation import ModelDrafts, Speculation
from tests.fake import FakeBackend

FACTS = BackendFacts(
    n_ctx=512, n_cells=512, n_seqs=1, n_ubatch=64, n_outputs=8, n_rollback=3, max_drafts=63
)

ROLLBACK = "this model's memory has no rollback"
MARKS = "with --exact, this model takes drafts from a head or a draft model only"


def speculation(exact: bool, maximum: int = 48, **facts: Any) -> tuple[Speculation, str]:
    source = NgramSource("ngram-mod", 24, maximum)
    return Speculation.from_facts(replace(FACTS, **facts), [source], None, n_draft=5, exact=exact)


@pytest.mark.parametrize(
    ("exact", "facts", "reason"),
    [
        (False, {}, ""),
        (True, {}, ""),
        (False, {"n_rollback": 0}, ""),
        (True, {"n_rollback": 0}, MARKS),
        (False, {"n_rollback": 0, "max_drafts": 0}, ROLLBACK),
        (True, {"n_rollback": 0, "max_drafts": 0}, ROLLBACK),
    ],
)
def test_speculation_is_off_for_a_reason(exact: bool, facts: dict[str, int], reason: str) -> None:
    found, why = speculation(exact, **facts)
    assert why == reason
    assert found.names == (() if reason else ("ngram-mod",))


def test_nothing_is_off_where_nothing_would_draft() -> None:
    found, why = speculation(exact=False, maximum=0, max_drafts=0)
    assert why == ""
    assert found.names == ("ngram-mod",)
    empty, why = Speculation.from_facts(
        replace(FACTS, max_drafts=0), [], None, n_draft=3, exact=True
    )
    assert not empty
    assert why == ""


def test_exact_drafts_have_one_length_that_costs_nothing_to_take_back() -> None:
    backend = FakeBackend(draft_type="draft-mtp")
    for n_draft, width in ((5, 3), (2, 2)):
        model = ModelDrafts(backend, n_draft)
        found, _ = Speculation.from_facts(FACTS, [], model, n_draft=n_draft, exact=True)
        assert found.width == width
        assert found.lengths is None


@pytest.mark.parametrize(("is_async", "costs_graphs"), [(True, True), (False, False)])
def test_lengths_follow_from_the_facts(is_async: bool, costs_graphs: bool) -> None:
    found, _ = speculation(exact=False, is_async=is_async, has_state_history=True)
    assert found.width == 0
    assert found.lengths is not None
    assert found.lengths.n_free == FACTS.n_rollback
    assert (found.lengths.costs(1).graph_ms > 0) == costs_graphs
