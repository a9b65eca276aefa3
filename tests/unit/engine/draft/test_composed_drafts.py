"""Drafts composed of several sources: the tokens requested and counted of each, and the cases in
which it pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pyctl.cache.sequence import LiveSequence
from pyctl.engine.draft.accepted_share import Origin
from pyctl.engine.draft.draft_length import DraftLengthController
from pyctl.engine.draft.source import NO_MATCH, DraftJob, Match
from pyctl.engine.draft.speculation import PATIENCE, STRIDE, Speculation
from pyctl.prompt import as_tokens
from tests.unit.engine.draft.guesses import Told

EMPTY = LiveSequence(0, 4096)


class Cache(Told):
    """Continues a draft of the tokens before with ``more``."""

    def __init__(self, more: tuple[int, ...], *drafts: tuple[int, ...]) -> None:
        super().__init__("cache", *drafts)
        self.more, self.asked = more, list[tuple[tuple[int, ...], int]]()

    def match(self, job: DraftJob, draft: tuple[int, ...] = ()) -> Match:
        return Match(16, lambda n: self._more(draft, n)) if draft else super().match(job)

    def _more(self, draft: tuple[int, ...], n: int) -> tuple[int, ...]:
        self.asked.append((draft, n))
        return self.more[:n]


def proposed(speculation: Speculation, maximum: int = 16, n_seqs: int = 1) -> list[tuple[int, ...]]:
    jobs = [DraftJob(key, EMPTY, (5,), maximum) for key in range(n_seqs)]
    return [draft.tokens for draft in speculation.propose(jobs)]


def test_the_model_does_not_draft_behind_many_sure_tokens() -> None:
    head: Any = Told("draft-mtp", (1, 2), (3, 4))
    speculation = Speculation([Told("ngram-mod", (), ())], head)
    jobs = [DraftJob(0, EMPTY, (5, 6, 7, 8, 9), 16), DraftJob(1, EMPTY, (5, 6, 7, 8), 16)]
    assert [draft.tokens for draft in speculation.propose(jobs)] == [(), (3, 4)]


def measured(
    slope: float, *, n_seqs: int = 1, n_free: int = 1024, longest: int = 64
) -> DraftLengthController:
    """Return a controller that has measured steps of 10 ms and ``slope`` of that for each more
    token.
    """
    controller = DraftLengthController(n_free=n_free)
    for _ in range(2):
        for n in range(longest + 1):
            width = n_seqs * (1 + n)
            controller.costs(n_seqs).add(width, 10 * (1 + slope * (width - n_seqs)))
    return controller


def step(speculation: Speculation, slope: float, reply: Sequence[int]) -> tuple[int, ...]:
    """Record one step of a request whose reply goes on with ``reply``; return the draft."""
    seq = LiveSequence(0, 4096)
    (draft,) = speculation.propose([DraftJob(0, seq, (5,), 64)])
    n = next(
        (i for i, (a, b) in enumerate(zip(draft.tokens, reply, strict=False)) if a != b),
        len(draft.tokens),
    )
    width = 1 + len(draft.tokens)
    speculation.record({0: n}, width, 10 * (1 + slope * (width - 1)))
    seq.reset(as_tokens([5, *reply]))
    speculation.propose([DraftJob(0, seq, (), 0)])  # the next step sees the reply
    return draft.tokens


class Recording(DraftLengthController):
    """All that is allowed, and what was learnt."""

    def __init__(self, *, continues: bool) -> None:
        super().__init__()
        self.continues, self.learnt = continues, dict[Origin, tuple[int, int]]()

    def length(
        self, key: int, origin: Origin, limit: int, n_seqs: int = 1, *, n_before: int = 0
    ) -> int:
        return limit if self.continues or not n_before else 0

    def learn(self, key: int, origin: Origin, n: int, n_right: int) -> None:
        self.learnt[origin] = n, n_right


@pytest.mark.parametrize("continues", [True, False])
@pytest.mark.parametrize(
    ("reply", "of_each"),
    [
        ((9,), {"head": (2, 0)}),
        ((1, 9), {"head": (2, 1)}),
        ((1, 2, 9), {"head": (2, 2), "head+cache": (3, 0)}),
        ((1, 2, 3, 4, 9), {"head": (2, 2), "head+cache": (3, 2)}),
        ((1, 2, 3, 4, 5), {"head": (2, 2), "head+cache": (3, 3)}),
        ((1, 2, 3), {"head": (2, 2)}),  # the reply may go on as proposed
        ((1,), {}),
    ],
)
def test_each_source_is_known_by_its_own_tokens_evaluated_or_not(
    reply: tuple[int, ...], of_each: dict[str, tuple[int, int]], *, continues: bool
) -> None:
    head: Any = Told("head", (1, 2), n_max=2)
    lengths = Recording(continues=continues)
    seq = LiveSequence(0, 4096)
    speculation = Speculation([Cache((3, 4, 5), ())], head, lengths=lengths)
    with speculation.following(0, as_tokens([1])):
        for said in ((5,), (5, *reply)):
            lengths.learnt.clear()
            (draft,) = speculation.propose([DraftJob(0, seq, said, 16)])
            assert said != (5,) or draft.tokens == ((1, 2, 3, 4, 5) if continues else (1, 2))
    assert {
        origin.source: found for origin, found in lengths.learnt.items() if not origin.is_before
    } == of_each


class Closed(DraftLengthController):
    """Allows no drafts of texts beside other replies."""

    def may_copy(self, n_seqs: int) -> bool:
        return n_seqs == 1


class Counting(Told):
    """Counts how often it is asked, and has nothing."""

    n_asked = 0

    def match(self, job: DraftJob, draft: tuple[int, ...] = ()) -> Match:
        self.n_asked += 1
        return NO_MATCH


@pytest.mark.parametrize(("n_seqs", "n_asked"), [(1, 1), (4, 0)])
def test_texts_are_not_searched_while_none_is_allowed(n_seqs: int, n_asked: int) -> None:
    source = Counting("cache")
    proposed(Speculation([source], lengths=Closed()), n_seqs=n_seqs)
    assert source.n_asked == n_asked


@pytest.mark.parametrize("n_seqs", [1, 2, 4])
def test_texts_that_have_nothing_are_searched_as_often_for_one_reply_as_for_several(
    n_seqs: int,
) -> None:
    source = Counting("cache")
    speculation = Speculation([source], lengths=DraftLengthController())
    for _ in range(PATIENCE):
        proposed(speculation, n_seqs=n_seqs)
    source.n_asked = 0
    n_steps = 8 * STRIDE
    for _ in range(n_steps):
        proposed(speculation, n_seqs=n_seqs)
    assert source.n_asked == n_steps / STRIDE


def test_what_the_cache_knows_comes_first_and_is_not_asked_twice() -> None:
    head: Any = Told("head", (1, 2))
    cache = Cache((9,), (7, 8))
    assert proposed(Speculation([cache], head)) == [(7, 8)]
    assert cache.asked == []


@pytest.mark.parametrize(
    ("width", "maximum", "expected"), [(4, 16, (1, 2, 3, 4)), (8, 16, (1, 2, 3, 4, 5, 5, 5, 5))]
)
def test_with_a_width_drafts_are_cut_or_padded_to_it(
    width: int, maximum: int, expected: tuple[int, ...]
) -> None:
    head: Any = Told("head", (1, 2), n_max=2)
    cache = Cache((3, 4) if width == 8 else (3, 4, 5), ())
    assert proposed(Speculation([cache], head, width=width), maximum)[0] == expected


def test_no_draft_is_longer_than_there_is_room() -> None:
    head: Any = Told("head", (1, 2), n_max=2)
    assert proposed(Speculation([Cache((3, 4, 5), ())], head), 3) == [(1, 2, 3)]
    assert proposed(Speculation([Cache((3, 4, 5), ())], head), 2) == [(1, 2)]


def test_tokens_of_images_end_a_draft() -> None:
    head: Any = Told("head", (1, 2), n_max=2)
    assert proposed(Speculation([Cache((3, -7, 5), ())], head)) == [(1, 2, 3)]


@pytest.mark.parametrize("n_free", [3, 1024])
def test_a_continuation_that_is_right_grows_and_one_that_is_wrong_ends(n_free: int) -> None:
    reply = tuple(range(1, 80))
    for more, is_right in ((reply[3:], True), ((99,) * 60, False)):
        head: Any = Told("head", reply[:3])
        speculation = Speculation([Cache(more, ())], head, lengths=measured(0.05, n_free=n_free))
        with speculation.following(0, as_tokens([1])):
            drafts = [len(step(speculation, 0.05, reply)) for _ in range(200)]
        longer = [n for n in drafts[20:] if n > 3]
        assert max(drafts) > 3, "it is tried"
        if is_right:
            assert len(longer) > 150
            assert max(longer) > 20
        else:
            assert len(longer) < 12
            assert max(drafts[20:]) <= 5, "by two tokens at a time"


def test_dear_steps_are_not_filled() -> None:
    reply = tuple(range(1, 80))
    head: Any = Told("head", reply[:1], n_max=1)
    speculation = Speculation([Cache(reply[1:], ())], head, lengths=measured(1.2))
    with speculation.following(0, as_tokens([1])):
        drafts = [len(step(speculation, 1.2, reply)) for _ in range(100)]
    assert max(drafts) <= 3


def test_beside_others_a_continuation_stays_where_rollback_is_free() -> None:
    for n_free, expected in ((3, 3), (1024, 8)):
        head: Any = Told("head", (1, 2, 3), (1, 2, 3))
        cache = Cache((4, 5, 6, 7, 8), (), ())
        controller = measured(0.01, n_seqs=2, n_free=n_free)
        lengths = proposed(Speculation([cache], head, lengths=controller), n_seqs=2)
        assert {len(draft) for draft in lengths} == {expected}


def test_the_source_that_promises_more_comes_first() -> None:
    """The head is right and the cache is wrong; then the other way round."""
    for head_share, cache_share in ((1.0, 0.0), (0.0, 1.0)):
        reply = tuple(range(1, 40))
        wrong = (99,) * 40
        head: Any = Told("head", reply[:3] if head_share else wrong[:3])
        cache: Any = Told("cache", reply[:6] if cache_share else wrong[:6])
        speculation = Speculation([cache], head, lengths=measured(0.1))
        with speculation.following(0, as_tokens([1])):
            drafts = [step(speculation, 0.1, reply) for _ in range(60)]
        right = reply[:3] if head_share else reply[:6]
        assert sum(draft == right for draft in drafts[10:]) > 40


@pytest.mark.parametrize("width", [1, 3, 7])
def test_with_a_width_each_position_is_evaluated_with_one_number_of_rows(width: int) -> None:
    """Whichever batch it comes in: llama.cpp pads the number, and a GPU sums each number of rows in
    other parts.
    """
    head: Any = Told("head", *[tuple(range(1, 9))] * 1100, n_max=8)
    speculation = Speculation([], head, width=width)
    n_rows = dict[int, set[int]]()
    n_drafted = 0
    for n in range(1100):
        seq = LiveSequence(0, 4096)
        seq.append(as_tokens([1] * n), exact=True)
        (draft,) = speculation.propose([DraftJob(0, seq, (5,), 16)])
        assert len(draft.tokens) == width
        n_drafted += draft.n_drafted
        padded = -(-(n + 1 + width) // 256) * 256
        for position in range(n, n + 1 + draft.n_drafted):
            n_rows.setdefault(position, set()).add(padded)
    assert {len(found) for found in n_rows.values()} == {1}
    assert n_drafted > 0.95 * 1100 * width
