"""Prompts with images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pyctl.files.image_file import ImageFile
from pyctl.prompt import ImageSpan, Prompt
from tests.pictures import image_bytes

SOURCE = ImageFile.parse(image_bytes())


def picture(key: bytes = b"key", columns: int = 4, lines: int = 3, start: int = 0) -> ImageSpan:
    return ImageSpan(key, columns, lines, SOURCE, start)


def prompt(*pictures: ImageSpan, size: int = 40) -> Prompt:
    tokens = np.arange(size, dtype=np.int32)
    for each in pictures:
        tokens[each.start : each.end] = each.tokens
    return Prompt(tokens, (20,), pictures=pictures)


def test_tokens_of_an_image_are_its_own() -> None:
    one = picture().tokens
    assert one.shape == (12,)
    assert (one < -1).all()
    assert (one == picture(start=7).tokens).all()
    assert not (one == picture(b"kez").tokens).any()
    assert len(set(picture(columns=60, lines=60).tokens.tolist())) == 3600


def test_a_prompt_has_its_images_where_it_says() -> None:
    assert prompt(picture(start=2), picture(b"b", start=14)).pictures[1].end == 26
    with pytest.raises(ValueError, match="no image"):
        Prompt(np.arange(20, dtype=np.int32), pictures=(picture(start=3),))
    with pytest.raises(ValueError, match="no image"):
        replace(prompt(picture(start=2)), pictures=(picture(start=3),))
    with pytest.raises(ValueError, match="no image"):
        replace(prompt(picture(start=2)), pictures=(picture(start=2), picture(start=2)))
    with pytest.raises(ValueError, match="no image"):
        Prompt(picture().tokens[:-1], pictures=(picture(),))


def test_the_beginning_of_a_prompt_has_whole_images_only() -> None:
    whole = prompt(picture(start=2), picture(b"b", start=14))
    assert [len(whole.first(n)) for n in (1, 2, 3, 13, 14, 15, 26, 30)] == [
        1,
        2,
        2,
        2,
        14,
        14,
        26,
        30,
    ]
    assert [len(whole.first(n).pictures) for n in (13, 14, 25, 26)] == [0, 1, 1, 2]
