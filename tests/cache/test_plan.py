"""Batch ends depend on the prompt's prefix alone; cuts are among them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.plan import batch_ends, choose_cuts
from pyctl.prompt import Prompt, as_tokens


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
    assert choose_cuts(prompt(1000), batch_ends(prompt(1000), 64, 32), 0, 0) == [448, 960]
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


@given(st.sets(st.integers(1, 20_000), max_size=60), st.integers(100, 20_000), st.integers(1, 20_000))
def test_a_history_changed_anywhere_costs_about_what_follows(boundaries: set[int], n: int, back: int) -> None:
    given_prompt = prompt(n, *boundaries)
    ends = batch_ends(given_prompt, 64, 32)
    cuts = choose_cuts(given_prompt, ends, 0, 0)
    changed = n - min(back, n)
    # Once again as much as from the change on, half of that more for a boundary, and one batch.
    assert n - max((cut for cut in cuts if cut <= changed), default=0) <= max(3 * (n - changed), 768) + 64


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
    assert batch_ends(raw(200, 0), 48) == [48, 96, 144, 192, 200]
    assert batch_ends(raw(300, 10, 100), 512) == [40, 80, 300], "a message ends no batch of 20"
    assert batch_ends(raw(300, 10, 115), 512) == [40, 80, 115, 300]


@given(st.integers(0, 700), st.integers(1, 3000), st.integers(1, 600), st.integers(32, 512))
def test_longer_unmarked_text_stops_where_the_shorter_one_did(line: int, n: int, more: int, n_ubatch: int) -> None:
    short, longer = (batch_ends(raw(size, line), n_ubatch) for size in (n, n + more))
    assert short[-1] == n
    assert [end for end in longer if end < n] == short[:-1]
    assert all(0 < b - a <= n_ubatch for a, b in zip([0, *longer], longer, strict=False))


@given(st.integers(0, 700), st.integers(1, 100_000))
def test_unmarked_text_is_mostly_kept_and_not_cut_small(line: int, n: int) -> None:
    ends = batch_ends(raw(n, line), 512)
    kept = max((end for end in ends if end < n), default=0)
    assert n - kept <= max(64, n / 4)
    assert len(ends) <= n / 512 + 26
