"""Headers of image files, also of hostile ones."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pyctl.errors import RequestError
from pyctl.files.image_file import MAX_PIXELS, ImageFile
from tests.effort import examples
from tests.pictures import image_bytes

KINDS = ("png", "jpeg", "gif", "bmp", "webp")
FILES = {
    **{kind: image_bytes(70, 31, kind) for kind in KINDS},
    "progressive": image_bytes(70, 31, "jpeg", progressive=True),
    "lossless": image_bytes(70, 31, "webp", lossless=True),
    "restarts": image_bytes(70, 31, "jpeg", restart_marker_blocks=1, comment=b"\xff\xc0 none"),
}
OF_KIND = {"progressive": "jpeg", "restarts": "jpeg", "lossless": "webp"}


def chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png(
    width: int, height: int, pixels: bytes, depth: int = 8, colour: int = 2, interlace: int = 0
) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(pixels)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def bmp(width: int, height: int, size: int) -> bytes:
    return (
        b"BM"
        + struct.pack("<IIIIiiHHI24x", 0, 0, 54, 40, width, height, 1, 24, 0)[:52]
        + bytes(size)
    )


@pytest.mark.parametrize("name", FILES)
def test_kind_and_size(name: str) -> None:
    image = ImageFile.parse(FILES[name])
    assert image.kind == OF_KIND.get(name, name)
    assert image.width == 70
    assert image.height == 31
    image.check_inflated()


def test_sizes_are_as_pillow_says() -> None:
    options: list[tuple[str, dict[str, Any]]] = [(kind, {}) for kind in KINDS]
    # A profile makes a WebP one of the extended kind.
    options += [("webp", {"lossless": True}), ("webp", {"icc_profile": b"none"})]
    for kind, more in options:
        for size in ((1, 1), (3, 200), (257, 2), (2, 300)):
            data = image_bytes(*size, kind, **more)
            image = ImageFile.parse(data)
            assert Image.open(io.BytesIO(data)).size == size
            assert image.width == size[0]
            assert image.height == size[1]
            image.check_inflated()


@pytest.mark.parametrize(
    ("depth", "colour", "channels"), [(1, 0, 1), (2, 3, 1), (4, 0, 1), (8, 4, 2), (16, 6, 4)]
)
def test_any_png_may_have_all_its_pixels_and_no_fewer(
    depth: int, colour: int, channels: int
) -> None:
    for width, height in ((1, 1), (5, 3), (13, 17)):
        line = (width * depth * channels + 7) // 8 + 1
        ImageFile.parse(png(width, height, bytes(line * height), depth, colour)).check_inflated()
        with pytest.raises(RequestError, match="cut off"):
            ImageFile.parse(
                png(width, height, bytes(line * height - 1), depth, colour)
            ).check_inflated()


def test_interlaced_png() -> None:
    sizes = (
        (1, 1),
        (1, 1),
        (1, 1),
        (3, 1),
        (2, 2),
        (5, 1),
    )  # 5 x 3 in seven passes, of which one is empty
    needed = sum((columns * 3 + 1) * lines for columns, lines in sizes)
    ImageFile.parse(png(5, 3, bytes(needed), interlace=1)).check_inflated()
    with pytest.raises(RequestError, match="cut off"):
        ImageFile.parse(png(5, 3, bytes(needed - 1), interlace=1)).check_inflated()


def test_a_png_that_inflates_to_more_than_it_says() -> None:
    image = ImageFile.parse(png(10, 10, bytes(16 << 20)))
    assert len(image.data) < 20_000
    with pytest.raises(RequestError, match="more pixels than its header has"):
        image.check_inflated()


def test_a_png_whose_pixels_are_no_pixels() -> None:
    data = bytearray(png(10, 10, bytes(310)))
    data[43:47] = b"\xff\xff\xff\xff"
    with pytest.raises(RequestError, match="broken"):
        ImageFile.parse(bytes(data)).check_inflated()


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_off(name: str) -> None:
    data = FILES[name]
    for n in (len(data) // 2, len(data) - 3, 30, 12) if name != "gif" else (30, 12):
        with pytest.raises(RequestError, match="cut off"):
            ImageFile.parse(data[:n])


def test_sizes_are_bounded() -> None:
    side = 8001
    assert side * side > MAX_PIXELS
    for data in (png(side, side, b""), png(6000, 6000, b"", depth=16)):
        with pytest.raises(RequestError, match=r"at most .* are allowed"):
            ImageFile.parse(data)
    with pytest.raises(RequestError, match="32768"):
        ImageFile.parse(png(40_000, 1, b""))
    for size in ((0, 1), (1, 0)):
        with pytest.raises(RequestError, match="each side"):
            ImageFile.parse(png(*size, b""))
    with pytest.raises(RequestError, match="each side"):
        ImageFile.parse(bmp(-5, 5, 100))


def test_a_gif_whose_bytes_cannot_fill_its_screen() -> None:
    data = bytearray(FILES["gif"])
    data[6:10] = struct.pack("<HH", 32_768, 1953)
    with pytest.raises(RequestError, match="cut off"):
        ImageFile.parse(bytes(data))


def test_one_colour_is_the_smallest_gif_of_its_size() -> None:
    stream = io.BytesIO()
    Image.new("P", (4000, 3000)).save(stream, "GIF")
    image = ImageFile.parse(stream.getvalue())
    assert image.width == 4000
    assert image.height == 3000


def test_a_jpeg_of_too_many_scans() -> None:
    data = bytearray(FILES["progressive"])
    at = data.index(b"\xff\xc2")
    data[at + 5 : at + 9] = struct.pack(">HH", 7000, 7000)
    ImageFile.parse(bytes(data))
    with pytest.raises(RequestError, match="scans"):
        ImageFile.parse(bytes(data[:-2]) + b"\xff\xda" * 30 + b"\xff\xd9")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "only PNG"),
        (b"RIFF\x04\0\0\0WAVEfmt ", "only PNG"),
        (b"RIFF\x04\0\0\0WEBPVP8 ", "WEBP image is cut off"),
        (b"RIFF\x20\0\0\0WEBPVP8 " + bytes(40), "WEBP image is broken"),
        (b"\0\0\0\x18ftypheic", "only PNG"),
        (b"\xff\xd8\xff\xda\0\x08", "no size"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "no size at its start"),
        (png(1, 1, b"", depth=3), "unknown kind of pixels"),
        (b"BM" + bytes(60), "BMP image is broken"),
        (b"\xff\xd8" + b"\xff\xe0\0\x02" * 70_000, "parts before its pixels"),
        (png(1, 1, b"")[:33] + chunk(b"tEXt", b"") * 70_000, "parts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_read_says_why(data: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        ImageFile.parse(data)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from(sorted(FILES)),
    st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=6)), max_size=4),
    st.integers(0, 20_000),
)
def test_broken_files_are_refused_or_read_within_bounds(
    name: str, changes: list[tuple[int, bytes]], length: int
) -> None:
    data = bytearray(FILES[name])
    for at, values in changes:
        data[at : at + len(values)] = values
    with contextlib.suppress(RequestError):
        image = ImageFile.parse(bytes(data[:length]))
        assert 0 < image.width * image.height <= MAX_PIXELS
        image.check_inflated()


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from(
        (b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"GIF89a", b"BM", b"RIFF\0\0\0\0WEBP")
    ),
    st.binary(max_size=200),
)
def test_bytes_that_are_no_image(magic: bytes, data: bytes) -> None:
    with contextlib.suppress(RequestError):
        ImageFile.parse(magic + data)
