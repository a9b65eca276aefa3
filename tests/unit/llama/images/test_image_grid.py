"""Sizes of images in tokens, and the room that the largest one takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.llama.images.image_grid import MAX_TOKENS, MIN_TOKENS, ImageGrid

SIDES = st.integers(1, 8000)


@given(width=SIDES, height=SIDES, cell=st.sampled_from([28, 32]))
def test_any_image_has_tokens_within_the_limits(width: int, height: int, cell: int) -> None:
    grid = ImageGrid(cell)
    columns, lines = grid.grid_size(width, height)
    assert columns >= 1
    assert lines >= 1
    n_rounded = max(columns, lines)  # a side may be a token longer than it should
    assert MIN_TOKENS <= columns * lines <= MAX_TOKENS + n_rounded


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [(320, 160, (10, 5)), (335, 175, (10, 5)), (336, 176, (11, 6))],
)
def test_sides_are_rounded_to_whole_cells(
    width: int, height: int, expected: tuple[int, int]
) -> None:
    assert ImageGrid(32).grid_size(width, height) == expected


def test_an_image_that_is_too_large_keeps_its_shape() -> None:
    columns, lines = ImageGrid(32, (-1, 200)).grid_size(4000, 2000)
    assert columns * lines <= 200
    assert columns == 2 * lines


def test_an_image_that_is_too_small_grows() -> None:
    columns, lines = ImageGrid(32, (64, -1)).grid_size(32, 32)
    assert columns == 8
    assert lines == 8


@pytest.mark.parametrize(
    ("given_limits", "limits"),
    [
        ((-1, -1), (MIN_TOKENS, MAX_TOKENS)),
        ((4, -1), (4, MAX_TOKENS)),
        ((-1, 99), (MIN_TOKENS, 99)),
    ],
)
def test_limits_are_the_given_ones_or_the_encoders(
    given_limits: tuple[int, int], limits: tuple[int, int]
) -> None:
    assert ImageGrid(32, given_limits).limits == limits


@given(maximum=st.integers(9, 4096))
def test_the_largest_image_has_about_the_maximum_of_tokens(maximum: int) -> None:
    grid = ImageGrid(32, (-1, maximum))
    columns, lines = grid.grid_size(*grid.largest)
    assert maximum / 2 < columns * lines <= maximum


def test_attention_without_flash_takes_a_score_for_each_pair_of_patches() -> None:
    grid = ImageGrid(32, (-1, 256), width=64, feed_forward=128, n_heads=4)
    more = grid.compute_bytes(flash_attn=False) - grid.compute_bytes(flash_attn=True)
    assert more == 4 * 4 * (256 * 4) ** 2


def test_the_pixels_of_a_token_are_three_floats_each() -> None:
    assert ImageGrid(28).token_bytes == 28 * 28 * 3 * 4
