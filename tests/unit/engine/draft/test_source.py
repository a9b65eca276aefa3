"""The interface of draft sources, kept by each source that copies from a text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import PromptFacts
from pyctl.engine.draft.cache_drafts import CacheDrafts
from pyctl.engine.draft.ngram import ngram_sources
from pyctl.engine.draft.ngram_settings import NgramSettings
from pyctl.engine.draft.source import NO_MATCH, CopyingSource, DraftJob
from pyctl.prompt import as_tokens

TEXT = list(range(3, 80))
SAID = [*TEXT, 2, *TEXT[:40]]
"""A text, and most of it once more."""

NAMES = ("cache", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod")


@pytest.fixture(params=NAMES)
def source(request: pytest.FixtureRequest) -> Iterator[CopyingSource]:
    if request.param == "cache":
        yield CacheDrafts(2**14)
        return
    (made,) = ngram_sources([request.param], NgramSettings())
    yield made


def begin(source: CopyingSource, key: int, said: list[int]) -> DraftJob:
    """Begin a request with TEXT as its prompt, whose reply has said the rest; return its job."""
    seq = LiveSequence(0, 1000, facts=PromptFacts())
    seq.append(as_tokens(TEXT), exact=True)
    if isinstance(source, CacheDrafts):
        source.remember(seq.tokens)
    source.begin(key, seq.tokens)
    if isinstance(source, CacheDrafts):
        source.flush()
    for token in said[len(TEXT) : -1]:
        seq.append_one(token)
    return DraftJob(key, seq, (said[-1],), source.maximum)


def test_it_has_the_name_of_its_flag(source: CopyingSource) -> None:
    assert source.name in NAMES


def test_it_copies_what_followed_the_last_tokens(source: CopyingSource) -> None:
    match = source.match(begin(source, 1, SAID))
    draft = match.read(16)
    assert match.n > 0
    assert draft
    assert list(draft) == TEXT[40 : 40 + len(draft)]


@pytest.mark.parametrize("n", [1, 5])
def test_it_copies_no_more_than_is_asked_for(source: CopyingSource, n: int) -> None:
    assert len(source.match(begin(source, 1, SAID)).read(n)) <= n
    assert source.maximum > 0


def test_without_a_match_it_copies_nothing(source: CopyingSource) -> None:
    match = source.match(begin(source, 1, [*TEXT, 2, 1]))
    assert match.read(16) == ()


def test_an_ended_request_and_an_unknown_one_may_end(source: CopyingSource) -> None:
    begin(source, 1, SAID)
    source.end(1)
    source.end(1)
    source.end(99)


def test_no_match_has_no_tokens() -> None:
    assert NO_MATCH.n == 0
    assert NO_MATCH.read(100) == ()
