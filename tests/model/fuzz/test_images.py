"""Damaged image files are refused with an error or encoded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyctl.errors import RequestError
from pyctl.files.image_file import ImageFile
from pyctl.llama.images.image_encoder import ImageEncoder
from pyctl.llama.loader import load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.vision_settings import VisionSettings
from tests.effort import examples
from tests.pictures import image_bytes

FILES = [
    image_bytes(70, 31),
    image_bytes(64, 64, compress_level=0),
    image_bytes(70, 31, "jpeg"),
    image_bytes(70, 31, "jpeg", progressive=True),
    image_bytes(20, 20, "jpeg", restart_marker_blocks=1),
    image_bytes(33, 65, "gif"),
    image_bytes(40, 30, "bmp"),
    image_bytes(40, 30, "webp"),
    image_bytes(33, 20, "webp", lossless=True),
]

Change = tuple[int, int, bytes]


@pytest.fixture(scope="module")
def encoder(model_path: Callable[[str], Path], tiny_mmproj: Path) -> Iterator[ImageEncoder]:
    model = ModelSettings(path=str(model_path("tiny-hybrid")), n_ctx=512, n_ubatch=64, n_threads=1)
    loaded = load(model, vision=VisionSettings(str(tiny_mmproj), image_max_tokens=16))
    assert loaded.images is not None
    yield loaded.images
    loaded.backend.unload()


def broken(data: bytes, changes: list[Change]) -> bytes:
    """Return ``data`` with pieces of it replaced: a place, how much of what stands there goes, and
    what comes instead.
    """
    made = bytearray(data)
    for place, n, values in changes:
        at = place % (len(made) + 1)
        made[at : at + n] = values
    return bytes(made)


PLACES = st.integers(0, 64) | st.integers(0, 100_000)
CHANGES = st.lists(st.tuples(PLACES, st.integers(0, 8), st.binary(max_size=8)), max_size=6)


@settings(max_examples=examples(400), deadline=None)
@given(st.sampled_from(FILES), CHANGES)
@example(FILES[0], [(16, 4, b"\0\0\x7f\xff")])
@example(FILES[3], [(160, 2, b"\xff\xda")])
def test_broken_files_harm_nobody(
    encoder: ImageEncoder, data: bytes, changes: list[Change]
) -> None:
    with contextlib.suppress(RequestError):
        file = ImageFile.parse(broken(data, changes))
        picture = encoder.picture(file)
        assert picture.n_tokens <= 16 + 2
        assert max(file.width, file.height) <= 32_768


def test_files_that_are_whole_are_seen(encoder: ImageEncoder) -> None:
    for data in FILES:
        assert encoder.picture(ImageFile.parse(data)).n_tokens >= 1


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 100, b"RIFF\0\0\0\0WAVEfmt ", b"ID3\3", b"\x1aE\xdf\xa3", b"fLaC"]
)
def test_what_libmtmd_would_take_for_sound_or_film_never_gets_there(
    encoder: ImageEncoder, data: bytes
) -> None:
    with pytest.raises(RequestError, match="only PNG"):
        ImageFile.parse(data)
