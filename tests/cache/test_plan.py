"""Batch ends depend on the prompt's prefix alone; cuts are among them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache import plan
from pyctl.cache.plan import (
    DEEP,
    DEFAULT_STEP,
    FAR,
    MOST_SEAMS,
    batch_ends,
    choose_cuts,
    full_batch,
    last_common_end,
    last_end,
)
from pyctl.chat.boundaries import boundaries, headers
from pyctl.image_file import ImageFile
from pyctl.prompt import Picture, Prompt, as_tokens


def prompt(n: int, *boundaries: int) -> Prompt:
    return Prompt.of(np.zeros(n, np.int32), boundaries)


@pytest.mark.parametrize(
    ("given_prompt", "ends"),
    [
        (prompt(10), [10]),
        (prompt(64), [64]),
        (prompt(130), [64, 128, 130]),
        (prompt(200, 100), [64, 100, 164, 200]),
        (prompt(200, 100, 131), [64, 100, 164, 200]),  # 31 after the last end: too small a batch
        (prompt(200, 100, 132), [64, 100, 132, 196, 200]),
        (prompt(70, 64), [64, 70]),
        (prompt(40, 5, 36), [36, 40]),
        (prompt(200, 200 - 8), [64, 128, 192, 200]),
    ],
)
def test_batch_ends(given_prompt: Prompt, ends: list[int]) -> None:
    assert batch_ends(given_prompt, 64, 32) == ends


@given(
    data=st.data(),
    n_ubatch=st.integers(1, 80),
    min_batch=st.integers(1, 80),
    boundaries=st.sets(st.integers(1, 600), max_size=12),
    n=st.integers(1, 600),
    more=st.integers(1, 200),
)
def test_a_longer_prompt_stops_where_the_shorter_one_did(
    data: st.DataObject, n_ubatch: int, min_batch: int, boundaries: set[int], n: int, more: int
) -> None:
    min_batch = min(min_batch, n_ubatch)
    short = batch_ends(prompt(n, *boundaries), n_ubatch, min_batch)
    longer = batch_ends(prompt(n + more, *boundaries), n_ubatch, min_batch)
    assert short[-1] == n
    assert [end for end in longer if end < n] == short[:-1]
    assert all(0 < b - a <= n_ubatch for a, b in zip([0, *longer], longer, strict=False))


def test_cuts_are_head_last_message_generation_header_and_a_ladder() -> None:
    given_prompt = prompt(1000, 240, 440, 680, 936)
    ends = batch_ends(given_prompt, 64, 32)
    assert choose_cuts(given_prompt, ends, 0, 0) == [240, 432, 680, 936]
    assert choose_cuts(given_prompt, ends, 680, 0) == [936]
    assert choose_cuts(prompt(1000), batch_ends(prompt(1000), 64, 32), 0, 0) == [192, 448, 704, 960]
    assert choose_cuts(prompt(20), [20], 0, 0) == []


def test_a_conversation_told_in_one_message_is_cut_near_its_end() -> None:
    told = prompt(1010, 1000)
    ends = batch_ends(told, 64, 32)
    assert ends[-3:] == [960, 1000, 1010]
    assert {960, 1000} <= set(choose_cuts(told, ends, 0, 0))
    later = prompt(3010, 1000, 2000, 3000)
    assert last_end(batch_ends(later, 64, 32), 2999) not in choose_cuts(later, batch_ends(later, 64, 32), 0, 0)


def test_a_boundary_too_close_is_cut_before() -> None:
    given_prompt = prompt(300, 240, 250)
    ends = batch_ends(given_prompt, 64, 32)
    assert 250 not in ends
    assert choose_cuts(given_prompt, ends, 0, 0) == [240]


def test_long_stretches_are_cut_too() -> None:
    given_prompt = prompt(10_000, 500, 9_950)
    cuts = choose_cuts(given_prompt, batch_ends(given_prompt, 64, 32), 0, 2000)
    assert {500, 9_950} <= set(cuts)
    assert max(b - a for a, b in zip([0, *cuts], [*cuts, 10_000], strict=True)) <= 2000 + 64


@given(
    st.sets(st.integers(1, 60_000), max_size=80),
    st.integers(100, 60_000),
    st.integers(1, 60_000),
    st.sampled_from([2000, DEFAULT_STEP]),
    st.sampled_from([0, 15, 1000]),
)
def test_a_history_cut_anywhere_loses_little_more_than_a_snapshot_at_each_step_would(
    boundaries: set[int], n: int, at: int, step: int, n_most: int
) -> None:
    given_prompt = prompt(n, 500, *boundaries)
    ends = batch_ends(given_prompt, 64, 32)
    cuts = choose_cuts(given_prompt, ends, 0, step, (), n_most)
    if step == DEFAULT_STEP and n_most == 1000:
        step //= 2
    nearest = max((cut for cut in cuts if cut <= at), default=0)
    assert nearest > min(at, n) // step * step - step // 4 - 64 - 1
    assert step != DEFAULT_STEP or n_most != 15 or len(cuts) <= 15 or cuts == choose_cuts(given_prompt, ends, 0, step)


@given(st.sets(st.integers(1, 20_000), max_size=60), st.integers(100, 20_000), st.integers(1, 20_000))
def test_a_history_changed_anywhere_costs_about_what_follows(boundaries: set[int], n: int, back: int) -> None:
    given_prompt = prompt(n, *boundaries)
    ends = batch_ends(given_prompt, 64, 32)
    cuts = choose_cuts(given_prompt, ends, 0, 0)
    changed = n - min(back, n)
    # Once again as much as from the change on, half of that more for a boundary, and one batch.
    assert n - max((cut for cut in cuts if cut <= changed), default=0) <= max(3 * (n - changed), 768) + 64


TURN = (300, 300)


def conversation(n: int, head: int, *turn: int) -> Prompt:
    """A head, then messages of users and replies of the sizes ``turn``, again and again; headers are known."""
    boundaries, headers, at = [], [], head
    for size, is_reply in itertools.cycle((size, i % 2 == 1) for i, size in enumerate(turn)):
        if at >= n:
            return Prompt(as_tokens(np.zeros(n)), tuple(boundaries), headers=tuple(headers))
        boundaries.append(at)
        if is_reply:
            headers.append(at)
        at += size
    raise AssertionError


def test_a_costly_batch_ends_where_replies_begin_and_elsewhere_as_often_as_it_can_be_afforded() -> None:
    given_prompt = conversation(20_000, 2_000, *TURN)
    assert given_prompt.headers is not None
    ends = batch_ends(given_prompt, 1024, 32, 480)
    assert {*given_prompt.headers, 2_000} <= set(ends)
    others = set(ends) - set(given_prompt.headers)
    assert others <= {512, 1536, 2_000, 20_000, *given_prompt.boundaries}
    assert 5 <= len(others) < len(given_prompt.boundaries) / 3
    assert len(ends[:-1]) <= 20_000 / 480
    # Without a cost every message ends a batch; unknown headers may be anywhere.
    assert set(given_prompt.boundaries) <= set(batch_ends(given_prompt, 1024, 32))
    assert set(given_prompt.boundaries) <= set(batch_ends(prompt(20_000, *given_prompt.boundaries), 1024, 32, 480))


def test_all_messages_of_long_turns_end_a_batch() -> None:
    given_prompt = conversation(32_768, 2_018, 268, 718)
    assert set(given_prompt.boundaries) <= set(batch_ends(given_prompt, 1024, 32, 480))


def test_deep_in_a_prompt_fewer_batches_end_where_hardly_anybody_comes_back() -> None:
    given_prompt = conversation(200_000, 2_018, 268, 718)
    ends = batch_ends(given_prompt, 1024, 32, 480)
    headers = given_prompt.headers or ()
    users = [at for at in given_prompt.boundaries if at not in headers]
    assert set(headers) <= set(ends), "where prompts end"
    taken = [
        sum(at in ends for at in users if first < at <= first + DEEP) / (DEEP / 986)
        for first in range(0, 5 * DEEP, DEEP)
    ]
    assert taken == sorted(taken, reverse=True)
    assert taken[0] > 0.95
    assert 0.3 < taken[1] < 0.7
    assert taken[2] < 0.1
    # Without a cost every message ends a batch, there, too.
    assert set(given_prompt.boundaries) <= set(batch_ends(given_prompt, 1024, 32))


@pytest.mark.parametrize("is_raw", [False, True])
def test_far_in_a_prompt_batches_are_smaller_where_that_pays(is_raw: bool) -> None:
    given_prompt = prompt(200_000) if is_raw else conversation(200_000, 2_018, 268, 2_718)
    ends, far = (batch_ends(given_prompt, 1024, 32, 480, n) for n in (0, 512))
    assert [end for end in ends if end <= FAR] == [end for end in far if end <= FAR]
    assert set(given_prompt.headers or ()) <= set(far)
    behind = [(a, b) for a, b in itertools.pairwise(far) if a > FAR]
    assert len(behind) > 200
    assert max(b - a for a, b in behind) == 512
    assert max(b - a for a, b in itertools.pairwise(ends)) == 1024
    assert batch_ends(given_prompt, 256, 32, 480, 512) == batch_ends(given_prompt, 256, 32, 480)


def test_a_long_first_message_has_rungs_where_batches_cost_something() -> None:
    assert batch_ends(prompt(700), 512, 32, 1) == [64, 128, 256, 700]
    assert batch_ends(prompt(3000), 1024, 32, 480) == [512, 1536, 2560, 3000]


def lines(n: int, every: int, *boundaries: int, headers: tuple[int, ...] = ()) -> Prompt:
    """Messages in lines of so many tokens."""
    return Prompt(as_tokens(np.zeros(n)), boundaries, 0, tuple(range(every, n, every)), headers)


def test_where_batches_cost_nothing_they_end_at_lines_of_the_first_messages() -> None:
    # At least 64 tokens, and a quarter of the message so far, after the last one.
    assert batch_ends(lines(400, 10), 512) == [70, 140, 210, 280, 350, 400]
    assert batch_ends(prompt(700), 512) == [128, 256, 384, 512, 576, 700], "no line ends are known"
    # Or at a seam before that, if it is 16 tokens away: what comes behind a batch end does not change it.
    sewn = replace(lines(400, 10), seams=(20, 50, 120, 300))
    assert batch_ends(sewn, 512) == [20, 50, 120, 190, 260, 300, 380, 400]
    assert batch_ends(sewn, 512, batch_cost=480) == [400], "small batches cost a lot there"
    # A list may have one in each line, and is not cut to pieces for that.
    plain = lines(4000, 10)
    listed = batch_ends(replace(plain, seams=plain.line_ends), 512)
    assert listed[:3] == [20, 40, 60]
    assert len(listed) <= len(batch_ends(plain, 512)) + MOST_SEAMS
    # A line end shortly before it does not keep a message from ending a batch.
    assert batch_ends(lines(300, 10, 130, 290), 512) == [70, 130, 200, 270, 290, 300]
    # Nobody parts within a reply, nor later than in the fourth message.
    assert batch_ends(lines(300, 10, 100, headers=(100,)), 512) == [70, 100, 300]
    assert batch_ends(lines(300, 10, 40, 80, 120, 160), 512) == [40, 80, 120, 160, 300]
    assert batch_ends(lines(300, 10, 40, 80, 120), 512) == [40, 80, 120, 190, 260, 300]


@given(
    messages=st.lists(st.tuples(st.booleans(), st.integers(1, 900)), max_size=30),
    n_ubatch=st.sampled_from([64, 200, 512, 1024]),
    cost=st.one_of(st.just(0), st.integers(0, 700)),
    short=st.floats(0.01, 1),
    n_unmarked=st.integers(0, 300),
    line=st.integers(1, 200),
    seam=st.integers(1, 5),
    far=st.sampled_from([0, 40, 512]),
)
def test_headers_lines_and_costs_follow_from_the_prefix_alone(
    messages: list[tuple[bool, int]],
    n_ubatch: int,
    cost: int,
    short: float,
    n_unmarked: int,
    line: int,
    seam: int,
    far: int,
) -> None:
    start = (7, 8, 9)
    tokens = [0] * n_unmarked
    for is_reply, n in messages:
        tokens += [*(start if is_reply else (7, 8, 5)), *[0] * n]
    tokens = tokens or [0]
    line_ends = range(line, len(tokens) + 1, line)

    def ends(n: int) -> list[int]:
        ids = as_tokens(tokens[:n])
        found = boundaries(ids, [7])
        known = tuple(end for end in line_ends if end <= n)
        begins = headers(ids, found, start)
        seams = tuple(end for end in line_ends[::seam] if end <= n)
        given_prompt = Prompt(ids, found, min(n_unmarked, n), known, begins, seams=seams)
        return batch_ends(given_prompt, n_ubatch, 32, cost, far)

    n = max(int(len(tokens) * short), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "FAR", 2000)
        few, many = ends(n), ends(len(tokens))
        most = far if cost else 0  # without a cost lines divide batches
        assert all(0 < b - a <= full_batch(a, n_ubatch, most) for a, b in itertools.pairwise([0, *many]))
    # What begins within its last tokens the shorter one cannot know, and so it does not stop there.
    cut = [end for end in many if end < n - len(start)]
    assert few[: len(cut)] == cut
    assert set(few[:-1]) <= set(many)
    assert few[-1] == n


def test_ends_in_common_are_those_up_to_which_all_are() -> None:
    assert last_common_end([10, 20, 30], [10, 20, 40], 100) == 20
    assert last_common_end([10, 20, 30], [10, 30], 100) == 10, "the batch up to 30 was another one"
    assert last_common_end([10, 20, 30], [10, 20, 30], 29) == 20
    assert last_common_end([10], [20], 100) == 0


@given(st.integers(100, 20_000), st.booleans(), st.integers(1, 20_000))
def test_a_head_left_anywhere_costs_at_most_about_as_much_as_it_shares(n: int, has_messages: bool, at: int) -> None:
    given_prompt = prompt(n + 50, n) if has_messages else prompt(n)
    cuts = choose_cuts(given_prompt, batch_ends(given_prompt, 64, 32), 0, 0)
    left = min(at, n - 1)
    assert left - max((cut for cut in cuts if cut <= left), default=0) <= max(left / 2, 1024) + 64


@given(st.integers(600, 20_000), st.integers(1, 20_000))
def test_the_users_message_left_anywhere_costs_at_most_about_as_much_as_it_shares(n: int, at: int) -> None:
    told = replace(lines(n + 510, 10, 500, n + 500), headers=(n + 500,), turn=n + 500)
    ends = batch_ends(told, 512)
    cuts = choose_cuts(told, ends, 0, 0)
    left = min(at, n - 1)
    half = max(left / 2, 256)
    assert left - (max(cut for cut in cuts if cut <= 500 + left) - 500) <= half + half / 4 + 64


def test_no_snapshots_are_taken_within_results_of_tools_and_later_messages() -> None:
    def inside(*first: int, is_turn: bool = True) -> list[int]:
        """Cuts within a message of 3000 tokens that comes after those that begin at ``first``."""
        at = 500 + first[-1]
        told = Prompt(as_tokens(np.zeros(at + 3010)), (*first, at, at + 3000), turn=(at + 3000) * is_turn)
        cuts = choose_cuts(told, range(10, at + 3010, 10), 0, 0)
        return [cut - at for cut in cuts if at < cut < at + 1600]

    assert inside(1000, is_turn=False) == []
    assert inside(1000) == [180, 370, 750, 1500]
    assert inside(1000, 1500) == [180, 370, 750, 1500]
    assert inside(1000, 1500, 2000) == [], "one conversation's own"


def raw(n: int, line: int, n_unmarked: int | None = None) -> Prompt:
    """Unmarked text in lines of so many tokens, 0 for none that ends."""
    n_unmarked = n if n_unmarked is None else n_unmarked
    boundaries = (n_unmarked,) if n_unmarked < n else ()
    line_ends = tuple(range(line, n_unmarked + 1, line)) if line else ()
    return Prompt(as_tokens(np.zeros(n)), boundaries, n_unmarked, line_ends)


def test_unmarked_text_ends_batches_at_line_ends_and_without_any_between() -> None:
    assert batch_ends(raw(74, 10), 512) == [40, 74]
    assert batch_ends(raw(400, 10), 512) == [40, 80, 120, 160, 200, 240, 280, 320, 360, 400]
    assert batch_ends(raw(200, 0), 512) == [64, 128, 192, 200]
    sewn = replace(raw(400, 10), seams=(20, 60, 85, 270))
    assert batch_ends(sewn, 512) == [40, 80, 120, 160, 200, 240, 270, 310, 350, 390, 400]
    assert batch_ends(raw(200, 0), 48) == [48, 96, 144, 192, 200]
    assert batch_ends(raw(120, 10, 100), 512) == [40, 80, 120], "a message ends no batch of 20"
    assert batch_ends(raw(120, 10, 115), 512) == [40, 80, 115, 120]


@pytest.mark.parametrize("cost", [0, 480])
def test_where_a_part_of_unmarked_text_begins_a_batch_ends_and_a_snapshot_is_taken(cost: int) -> None:
    text = replace(raw(400, 10), parts=(35, 50, 215, 348))
    ends = batch_ends(text, 512, 32, cost)
    assert {35, 215, 348} <= set(ends)
    assert 50 not in ends, "15 tokens are no batch"
    assert {215, 348} <= set(choose_cuts(text, ends, 0, 0))


def test_a_batch_ends_at_the_line_before_a_cursor_and_at_the_cursor() -> None:
    plain = replace(raw(3400, 10), parts=(2420,))
    text = replace(plain, typed=(2400,))
    before = batch_ends(plain, 512)
    assert 2420 in before
    assert not any(2390 < end < 2420 for end in before)
    ends = batch_ends(text, 512)
    assert [end for end in ends if end < 2420] == [*(end for end in before if end < 2420), 2400]
    assert 2420 in ends
    assert len(ends) <= len(before) + 1
    assert {2400, 2420} <= set(choose_cuts(text, ends, 0, 0))
    assert batch_ends(text, 512, 32, 480) == batch_ends(plain, 512, 32, 480), "small batches cost a lot there"


@pytest.mark.parametrize("cost", [0, 480])
def test_text_full_of_parts_is_not_cut_small(cost: int) -> None:
    plain = raw(100_000, 10)
    text = replace(plain, parts=tuple(range(1, 100_000)))
    both = replace(text, typed=plain.line_ends)
    typed = batch_ends(both, 512, 32, cost)
    assert len(choose_cuts(both, typed, 0, 0)) <= len(choose_cuts(plain, batch_ends(plain, 512, 32, cost), 0, 0)) + 4
    assert len(typed) <= len(batch_ends(plain, 512, 32, cost)) + 2 * 64 * math.log(100_000 / 1024) + 64
    ends = batch_ends(text, 512, 32, cost)
    assert len(ends) <= len(batch_ends(plain, 512, 32, cost)) + 64 * math.log(100_000 / 1024) + 64
    assert len(set(choose_cuts(text, ends, 0, 0)) & set(ends[-3:])) == 2
    far = replace(plain, parts=(ends[-2] + 1,))
    assert far.parts[0] not in batch_ends(far, 512, 32, cost)
    last = batch_ends(far, 512, 32, cost)[-2]
    assert last in choose_cuts(far, batch_ends(far, 512, 32, cost), 0, 0), "as without parts"


@given(
    st.integers(0, 700),
    st.integers(1, 3000),
    st.integers(1, 600),
    st.integers(32, 512),
    st.sampled_from([0, 480]),
    st.sets(st.integers(1, 3600), max_size=20),
)
def test_longer_unmarked_text_stops_where_the_shorter_one_did(
    line: int, n: int, more: int, n_ubatch: int, cost: int, parts: set[int]
) -> None:
    known = tuple(sorted(part for part in parts if part < n + more))
    whole = replace(raw(n + more, line), parts=known, typed=tuple(part - 16 for part in known if part > 16))
    short, longer = (batch_ends(prompt, n_ubatch, 32, cost) for prompt in (whole.first(n), whole))
    assert short[-1] == n
    assert [end for end in longer if end < n] == short[:-1]
    assert all(0 < b - a <= n_ubatch for a, b in zip([0, *longer], longer, strict=False))


@given(st.integers(0, 700), st.integers(1, 100_000))
def test_unmarked_text_is_mostly_kept_and_not_cut_small(line: int, n: int) -> None:
    for cost, most, n_more in ((480, n / 4, 26), (0, min(n / 8, 512), n / 512 + 40)):
        ends = batch_ends(raw(n, line), 512, 32, cost)
        kept = max((end for end in ends if end < n), default=0)
        assert n - kept <= max(64, most)
        assert len(ends) <= n / 512 + n_more


def test_unmarked_text_may_be_changed_anywhere() -> None:
    text = raw(20_000, 10)
    cuts = [0, *choose_cuts(text, batch_ends(text, 1024, 32, 480), 0, 8192), 20_000]
    assert max(b - a for a, b in itertools.pairwise(cuts)) <= 512 + 1024
    few = choose_cuts(text, batch_ends(text, 1024, 32, 480), 0, 0)
    assert len(few) < len(cuts) / 2, "asked for none between"


def test_unmarked_text_has_twice_as_many_snapshots_where_there_is_room() -> None:
    text = raw(20_000, 10)
    ends = batch_ends(text, 512)
    cuts, all_ = choose_cuts(text, ends, 0, DEFAULT_STEP), choose_cuts(text, ends, 0, DEFAULT_STEP, (), 1000)
    assert max(b - a for a, b in itertools.pairwise([0, *all_])) <= 256 + 270
    assert len(all_) > 1.4 * len(cuts)
    assert choose_cuts(text, ends, 0, DEFAULT_STEP, (), len(all_)) == all_
    assert choose_cuts(text, ends, 0, DEFAULT_STEP, (), len(all_) - 1) == cuts
    assert choose_cuts(text, ends, 0, DEFAULT_STEP - 1, (), 1000) == cuts, "another step was asked for"


@given(
    sizes=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=6),
    rest=st.integers(1, 400),
    boundaries=st.sets(st.integers(1, 3000), max_size=12),
    n_ubatch=st.integers(32, 512),
    cost=st.sampled_from([0, 480]),
    n_unmarked=st.sampled_from([0, 10**6]),
    known=st.integers(0, 6),
)
def test_images_are_batches_of_their_own(
    sizes: list[tuple[int, int, int]],
    rest: int,
    boundaries: set[int],
    n_ubatch: int,
    cost: int,
    n_unmarked: int,
    known: int,
) -> None:
    """Both edges end a batch, inside it goes on in full ones from its beginning, and no cut lies there. Whatever comes
    behind an image changes nothing of that."""
    ids: list[int] = []
    pictures: list[Picture] = []
    for i, (n_text, columns, lines) in enumerate(sizes):
        ids += [7] * (n_text + 1)
        key, source = bytes([i]), ImageFile(b"", "png", 1, 1)
        pictures.append(Picture(key, columns, lines, source, len(ids)))
        ids += pictures[-1].tokens.tolist()
    ids += [7] * rest

    def made(n: int) -> Prompt:
        inner = [picture for picture in pictures if picture.end <= n]
        at = [b for b in sorted(boundaries) if b < n and not any(p.start < b < p.end for p in inner)]
        return Prompt(as_tokens(ids[:n]), tuple(at), min(n_unmarked, n) if not at else 0, pictures=tuple(inner))

    whole = made(len(ids))
    ends = batch_ends(whole, n_ubatch, 32, cost)
    assert all(0 < b - a <= n_ubatch for a, b in zip([0, *ends], ends, strict=False))
    for picture in pictures:
        inside = [end for end in ends if picture.start < end < picture.end]
        assert {picture.start, picture.end} <= set(ends)
        assert inside == [*range(picture.start + n_ubatch, picture.end, n_ubatch)]
    cuts = choose_cuts(whole, ends, 0, 64)
    assert not any(whole.is_inside(cut) for cut in cuts)
    assert pictures[-1].end in cuts
    last = pictures[min(known, len(pictures) - 1)]
    shorter = made(last.end + 1)
    if bool(shorter.n_unmarked) == bool(whole.n_unmarked):
        first_ends = batch_ends(shorter, n_ubatch, 32, cost)
        assert [end for end in ends if end <= last.end] == [end for end in first_ends if end <= last.end]
