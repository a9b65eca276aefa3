"""Batch ends depend on the prompt's prefix alone; cuts are among them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.plan import DEFAULT_STEP, batch_ends, choose_cuts
from pyctl.cache.positions import last_common_end
from pyctl.chat.boundaries import boundaries, headers
from pyctl.files.image_file import ImageFile
from pyctl.prompt import ImageSpan, Prompt, as_tokens


def prompt(n: int, *boundaries: int) -> Prompt:
    return Prompt.from_ids(np.zeros(n, np.int32), boundaries)


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


def test_cuts_are_head_last_message_generation_header_and_a_ladder() -> None:
    given_prompt = prompt(1000, 240, 440, 680, 936)
    ends = batch_ends(given_prompt, 64, 32)
    assert choose_cuts(given_prompt, ends, 0, 0) == [240, 432, 680, 936]
    assert choose_cuts(given_prompt, ends, 680, 0) == [936]
    assert choose_cuts(prompt(1000), batch_ends(prompt(1000), 64, 32), 0, 0) == [448, 704, 960]
    assert choose_cuts(prompt(20), [20], 0, 0) == []


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
)
def test_cut_history_costs_little_more_than_a_snapshot_per_step(
    boundaries: set[int], n: int, at: int, step: int
) -> None:
    given_prompt = prompt(n, 500, *boundaries)
    cuts = choose_cuts(given_prompt, batch_ends(given_prompt, 64, 32), 0, step)
    nearest = max((cut for cut in cuts if cut <= at), default=0)
    assert nearest > min(at, n) // step * step - step // 4 - 64 - 1


@given(
    st.sets(st.integers(1, 20_000), max_size=60), st.integers(100, 20_000), st.integers(1, 20_000)
)
def test_a_history_changed_anywhere_costs_about_what_follows(
    boundaries: set[int], n: int, back: int
) -> None:
    given_prompt = prompt(n, *boundaries)
    ends = batch_ends(given_prompt, 64, 32)
    cuts = choose_cuts(given_prompt, ends, 0, 0)
    changed = n - min(back, n)
    # Once again as much as from the change on, half of that more for a boundary, and one batch.
    assert (
        n - max((cut for cut in cuts if cut <= changed), default=0)
        <= max(3 * (n - changed), 768) + 64
    )


TURN = (300, 300)


def conversation(n: int, head: int, *turn: int) -> Prompt:
    """Return a head, then messages of users and replies of the sizes ``turn``, again and again;
    headers are known.
    """
    boundaries = []
    headers = []
    at = head
    for size, is_reply in itertools.cycle((size, i % 2 == 1) for i, size in enumerate(turn)):
        if at >= n:
            return Prompt(as_tokens(np.zeros(n)), tuple(boundaries), headers=tuple(headers))
        boundaries.append(at)
        if is_reply:
            headers.append(at)
        at += size
    raise AssertionError


def test_costly_batches_end_at_replies_and_when_affordable() -> None:
    given_prompt = conversation(20_000, 2_000, *TURN)
    ends = batch_ends(given_prompt, 1024, 32, 480)
    assert {*given_prompt.headers, 2_000} <= set(ends)
    others = set(ends) - set(given_prompt.headers)
    assert others <= {512, 1536, 2_000, 20_000, *given_prompt.boundaries}
    assert 5 <= len(others) < len(given_prompt.boundaries) / 3
    assert len(ends[:-1]) <= 20_000 / 480
    # Without a cost every message ends a batch; unknown headers may be anywhere.
    assert set(given_prompt.boundaries) <= set(batch_ends(given_prompt, 1024, 32))
    assert set(given_prompt.boundaries) <= set(
        batch_ends(prompt(20_000, *given_prompt.boundaries), 1024, 32, 480)
    )


def test_nearly_all_messages_of_long_turns_end_a_batch_however_deep() -> None:
    given_prompt = conversation(200_000, 2_018, 268, 718)
    headers = given_prompt.headers or ()
    users = [at for at in given_prompt.boundaries if at not in headers]
    ends = batch_ends(given_prompt, 1024, 32, 512)
    assert set(headers) <= set(ends), "where prompts end"
    assert 0.9 < sum(at in ends for at in users) / len(users) < 0.95
    late = users[-len(users) // 4 :]
    assert 0.9 < sum(at in ends for at in late) / len(late) < 0.95
    assert len(ends) - 1 <= 200_000 / 512
    # Without a cost every message ends a batch.
    assert set(given_prompt.boundaries) <= set(batch_ends(given_prompt, 1024, 32))


def test_tasks_with_equal_instructions_branch_half_a_batch_in() -> None:
    assert batch_ends(prompt(3000), 1024, 32, 480) == [512, 1536, 2560, 3000]
    assert batch_ends(prompt(3000), 1024, 32, 600) == [1024, 2048, 3000], "too dear"
    assert batch_ends(prompt(500), 1024, 32, 480) == [500]


@given(
    messages=st.lists(st.tuples(st.booleans(), st.integers(1, 900)), max_size=30),
    n_ubatch=st.sampled_from([64, 200, 512, 1024]),
    cost=st.one_of(st.just(0), st.integers(0, 700)),
    short=st.floats(0.01, 1),
    n_raw=st.integers(0, 300),
)
def test_headers_raw_text_and_costs_follow_from_the_prefix_alone(
    messages: list[tuple[bool, int]], n_ubatch: int, cost: int, short: float, n_raw: int
) -> None:
    """A shorter prompt is cut into the same batches as a longer one that continues it, up to a few
    tokens before its end. Rows are exact only if both are evaluated in equal batches.
    """
    start = (7, 8, 9)
    tokens = [0] * n_raw
    for is_reply, n in messages:
        tokens += [*(start if is_reply else (7, 8, 5)), *[0] * n]
    tokens = tokens or [0]

    def ends(n: int) -> list[int]:
        ids = as_tokens(tokens[:n])
        found = boundaries(ids, [7])
        given_prompt = Prompt(ids, found, headers(ids, found, start), n_raw=min(n_raw, n))
        return batch_ends(given_prompt, n_ubatch, 32, cost)

    n = max(int(len(tokens) * short), 1)
    few = ends(n)
    many = ends(len(tokens))
    assert all(0 < b - a <= n_ubatch for a, b in itertools.pairwise([0, *many]))
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


def raw(n: int, n_raw: int | None = None) -> Prompt:
    """Return ``n`` tokens of raw text; a message begins after ``n_raw``."""
    n_raw = n if n_raw is None else min(n_raw, n)
    boundaries = (n_raw,) if 0 < n_raw < n else ()
    return Prompt(as_tokens(np.zeros(n)), boundaries, n_raw=n_raw)


def test_raw_text_ends_batches_after_whole_fills() -> None:
    assert batch_ends(raw(74), 64) == [32, 64, 74]
    assert batch_ends(raw(400), 80) == [40, 80, 120, 160, 200, 240, 280, 320, 360, 400]
    assert batch_ends(raw(300), 512) == [256, 300], "half a batch is new"
    assert batch_ends(raw(512), 512) == [256, 512]
    assert batch_ends(raw(1300), 1024, 32, 480) == [512, 1024, 1300]
    assert batch_ends(raw(1500), 1024, 32, 600) == [600, 1200, 1500], "and what a batch costs"
    assert batch_ends(raw(6000), 512)[-4:] == [4608, 5120, 5632, 6000], "an eighth of it is new"
    assert batch_ends(raw(200), 48) == [32, 64, 96, 128, 160, 192, 200], "no batch is smaller"
    assert batch_ends(raw(120, 100), 80) == [40, 80, 120], "a message ends no batch of 20"
    assert batch_ends(raw(120, 115), 80) == [40, 80, 115, 120]
    assert batch_ends(raw(900, 100), 512) == [100, 612, 900], "messages are evaluated in one batch"


TEXTS = st.builds(raw, st.integers(2, 3600), st.integers(0, 3600)) | st.builds(
    lambda n, ends: prompt(n, *ends), st.integers(2, 800), st.sets(st.integers(1, 600), max_size=12)
)


@given(TEXTS, st.floats(0, 1), st.integers(1, 1024), st.integers(1, 80), st.sampled_from([0, 480]))
def test_a_longer_prompt_stops_where_the_shorter_one_did(
    whole: Prompt, share: float, n_ubatch: int, min_batch: int, cost: int
) -> None:
    n = 1 + int(share * (whole.tokens.size - 2))
    min_batch = min(min_batch, n_ubatch)
    short, longer = (
        batch_ends(prompt, n_ubatch, min_batch, cost) for prompt in (whole.first(n), whole)
    )
    assert short[-1] == n
    assert [end for end in longer if end < n] == short[:-1]
    assert all(0 < b - a <= n_ubatch for a, b in itertools.pairwise([0, *longer]))


@given(st.integers(1, 100_000), st.sampled_from([0, 480]))
def test_raw_text_is_mostly_kept_and_not_cut_small(n: int, cost: int) -> None:
    ends = batch_ends(raw(n), 512, 32, cost)
    assert n - max((end for end in ends if end < n), default=0) <= max(256, cost, n / 8)
    assert len(ends) <= n / 512 + 18


def test_raw_text_may_be_changed_anywhere() -> None:
    text = raw(20_000)
    cuts = [0, *choose_cuts(text, batch_ends(text, 1024, 32, 480), 0, DEFAULT_STEP), 20_000]
    assert max(b - a for a, b in itertools.pairwise(cuts)) <= 512 + 1024
    few = choose_cuts(text, batch_ends(text, 1024, 32, 480), 0, 0)
    assert len(few) < len(cuts) / 2, "asked for none between"


@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 20), st.integers(1, 20)),
        min_size=1,
        max_size=6,
    ),
    rest=st.integers(1, 400),
    boundaries=st.sets(st.integers(1, 3000), max_size=12),
    n_ubatch=st.integers(32, 512),
    cost=st.sampled_from([0, 480]),
    known=st.integers(0, 6),
)
def test_images_are_batches_of_their_own(
    sizes: list[tuple[int, int, int]],
    rest: int,
    boundaries: set[int],
    n_ubatch: int,
    cost: int,
    known: int,
) -> None:
    """Both edges end a batch, inside it goes on in full ones from its beginning, and no cut lies
    there. Whatever comes behind an image changes nothing of that.
    """
    ids: list[int] = []
    pictures: list[ImageSpan] = []
    for i, (n_text, columns, lines) in enumerate(sizes):
        ids += [7] * (n_text + 1)
        key = bytes([i])
        source = ImageFile(b"", "png", 1, 1)
        pictures.append(ImageSpan(key, columns, lines, source, len(ids)))
        ids += pictures[-1].tokens.tolist()
    ids += [7] * rest

    def made(n: int) -> Prompt:
        inner = [picture for picture in pictures if picture.end <= n]
        at = [
            b for b in sorted(boundaries) if b < n and not any(p.start < b < p.end for p in inner)
        ]
        return Prompt(as_tokens(ids[:n]), tuple(at), pictures=tuple(inner))

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
    first_ends = batch_ends(shorter, n_ubatch, 32, cost)
    assert [end for end in ends if end <= last.end] == [
        end for end in first_ends if end <= last.end
    ]
