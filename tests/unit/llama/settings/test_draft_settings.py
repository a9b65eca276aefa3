"""Settings of drafts: the names of their sources."""

from __future__ import annotations

import pytest

from pyctl.llama.settings.draft_settings import (
    DRAFT_TYPES,
    FEATURE_TYPES,
    MODEL_TYPES,
    DraftSettings,
    as_draft_types,
)


@pytest.mark.parametrize("name", DRAFT_TYPES)
def test_each_source_has_a_name(name: str) -> None:
    assert as_draft_types(name) == (name,)


def test_sources_keep_the_order_in_which_they_are_named() -> None:
    assert as_draft_types("cache,ngram-mod") == ("cache", "ngram-mod")


@pytest.mark.parametrize("text", ["none", "none,cache", "cache,none"])
def test_none_overrides_all_others(text: str) -> None:
    assert as_draft_types(text) == ("none",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram-cache", "is not supported; use one of ngram-simple"),
        ("magic", "unknown speculative type: magic; use one of ngram-simple"),
        ("cache,magic", "unknown speculative type: magic"),
    ],
)
def test_other_sources_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_draft_types(text)


def test_models_are_sources_and_some_of_them_read_rows_of_the_target() -> None:
    assert set(MODEL_TYPES) < set(DRAFT_TYPES)
    assert set(FEATURE_TYPES) < set(MODEL_TYPES)


def test_without_a_flag_no_source_is_named() -> None:
    assert DraftSettings().draft_types == ()
    assert DraftSettings().draft_path == ""
