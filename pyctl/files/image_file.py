"""Format and size of image files, from headers that decoders trust: checked before, without memory
for pixels.

By the PNG specification, ITU-T T.81 (JPEG), GIF89a, Microsoft's BITMAPINFOHEADER (BMP) and RFC 9649
(WebP).
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from pyctl.errors import RequestError
from pyctl.settings.limit import limit

__all__ = ["MAX_PIXELS", "ImageFile", "ImageKind"]

ImageKind: TypeAlias = Literal["png", "jpeg", "gif", "bmp", "webp"]

MAX_PIXELS = limit(
    64_000_000,
    "pixels of an image; half as many of WebP or with 16 bits a channel",
    "400",
    "request",
)
_MAX_SIDE = limit(32_768, "width and height of an image", "400", "request", "pixels")
_MAX_SEGMENTS = limit(65_536, "chunks of an image file before its pixels", "400", "request")
_MAX_SCANNED = limit(1_000_000_000, "pixels of a JPEG, times its scans", "400", "request")

_SLACK_BYTES = 1 << 20
"""Bytes that a PNG may hold after its pixels; some files do."""
_STEP_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class ImageFile:
    """An image file; create with `parse`. ``width`` and ``height`` are pixels, from the header."""

    data: bytes = field(repr=False)
    kind: ImageKind
    width: int
    height: int

    @classmethod
    def parse(cls, data: bytes) -> ImageFile:
        """Parse the bytes ``data`` of a file. Raises RequestError if it is not a supported image,
        too large or truncated.

        Other damage shows only when the image is decoded.
        """
        reader = next(
            ((kind, read) for magic, kind, read in _READERS if data.startswith(magic)), None
        )
        if reader is None or (reader[0] == "webp" and data[8:12] != b"WEBP"):
            raise RequestError("only PNG, JPEG, GIF, BMP and WebP images can be read")
        kind, read = reader
        try:
            width, height, cost = read(data)
        except (struct.error, IndexError, ValueError):
            raise RequestError(f"the {kind.upper()} image is cut off") from None
        if not (0 < width <= _MAX_SIDE and 0 < height <= _MAX_SIDE):
            raise RequestError(
                f"the image has {width} x {height} pixels, each side must have 1 to {_MAX_SIDE}"
            )
        if width * height * cost > MAX_PIXELS:
            raise RequestError(
                f"the image has {width} x {height} pixels, at most {MAX_PIXELS // cost} are allowed"
            )
        return cls(data, kind, width, height)

    @cached_property
    def digest(self) -> bytes:
        """BLAKE2b of the file, 16 bytes."""
        return hashlib.blake2b(self.data, digest_size=16).digest()

    def check_inflated(self) -> None:
        """Raise RequestError if the compressed pixels inflate to more or fewer bytes than the
        header implies.

        Call it before decoding: a few kilobytes of PNG may inflate to gigabytes.
        """
        if self.kind != "png":
            return
        expected = _png_bytes(self.data)
        maximum = expected + _SLACK_BYTES
        n_bytes = 0
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        skip = 2  # the header of the zlib stream; its checksum is not verified
        try:
            for part in (content for kind, content in _png_chunks(self.data) if kind == b"IDAT"):
                part, skip = part[skip:], max(skip - len(part), 0)
                while part and not inflater.eof and n_bytes <= maximum:
                    n_bytes += len(inflater.decompress(part, _STEP_BYTES))
                    part = memoryview(inflater.unconsumed_tail)
        except zlib.error:
            raise RequestError("the PNG image is broken") from None
        if n_bytes > maximum:
            raise RequestError("the PNG image has more pixels than its header has")
        if n_bytes < expected:
            raise RequestError("the PNG image is cut off")


def _png(data: bytes) -> tuple[int, int, int]:
    """Return width, height, and bytes per channel."""
    if data[8:16] != b"\0\0\0\rIHDR":
        if len(data) >= 16:
            raise RequestError("the PNG image is broken: no size at its start")
        raise IndexError
    width, height, depth, colour, _, _, interlace = struct.unpack_from(">IIBBBBB", data, 16)
    if (colour, depth) not in _PNG_CHANNELS or interlace > 1:
        raise RequestError("the PNG image is broken: unknown kind of pixels")
    for kind, _ in _png_chunks(data):
        if kind == b"IEND":
            return width, height, depth // 16 + 1
    raise IndexError


_PNG_CHANNELS = {
    (colour, depth): channels
    for colour, channels, depths in (
        (0, 1, (1, 2, 4, 8, 16)),
        (2, 3, (8, 16)),
        (3, 1, (1, 2, 4, 8)),
        (4, 2, (8, 16)),
        (6, 4, (8, 16)),
    )
    for depth in depths
}


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yield type and content of each chunk. Raises IndexError if the file ends within a chunk."""
    view = memoryview(data)
    pos = 8
    for _ in range(_MAX_SEGMENTS):
        if pos == len(data):
            return
        size, kind = struct.unpack_from(">I4s", data, pos)
        if pos + 12 + size > len(data):
            raise IndexError
        yield kind, view[pos + 8 : pos + 8 + size]
        if kind == b"IEND":
            return
        pos += 12 + size
    raise RequestError(f"the PNG image has more than {_MAX_SEGMENTS} parts")


_PASSES = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""Adam7 (PNG specification, section 8): for each pass the first column and line, and the steps in x
and y.
"""


def _png_bytes(data: bytes) -> int:
    """Return the bytes that the pixels of a PNG must inflate to."""
    width, height, depth, colour, _, _, interlace = struct.unpack_from(">IIBBBBB", data, 16)
    bits = depth * _PNG_CHANNELS[colour, depth]
    passes = _PASSES if interlace else ((0, 0, 1, 1),)
    sizes = ((-(-(width - x) // dx), -(-(height - y) // dy)) for x, y, dx, dy in passes)
    return sum(
        ((columns * bits + 7) // 8 + 1) * lines
        for columns, lines in sizes
        if columns > 0 and lines > 0
    )


def _jpeg(data: bytes) -> tuple[int, int, int]:
    """Return width, height, and 1 byte per channel, from the first frame.

    Raises IndexError for a truncated file, and RequestError for images whose many scans make them
    slow to decode.
    """
    pos = 2
    for _ in range(_MAX_SEGMENTS):
        pos = data.index(b"\xff", pos)  # bytes before a marker are padding
        while data[pos] == 0xFF:
            pos += 1
        mark = data[pos]
        if mark in (0xC0, 0xC1, 0xC2):
            height, width = struct.unpack_from(">HH", data, pos + 4)
            n_scans = data.count(b"\xff\xda", pos)
            if width * height * n_scans > _MAX_SCANNED:
                raise RequestError(
                    f"the JPEG image has {n_scans} scans, which are too many for its size"
                )
            if not n_scans or data.rfind(b"\xff\xd9", pos) < 0:
                raise IndexError
            return width, height, 1
        if mark in (0xD9, 0xDA):
            raise RequestError("the JPEG image is broken: it has no size")
        pos += 1 + max(struct.unpack_from(">H", data, pos + 1)[0], 2)
    raise RequestError(f"the JPEG image has more than {_MAX_SEGMENTS} parts before its pixels")


def _gif(data: bytes) -> tuple[int, int, int]:
    width, height = struct.unpack_from("<HH", data, 6)
    if b"\x2c" not in data[13:] or width * height > _GIF_RATIO * len(data):
        raise IndexError  # no frame, or none that could fill the screen
    return width, height, 1


_GIF_RATIO = 4096
"""Upper bound of pixels per LZW byte: a code has 12 bits and stands for at most 4,096 pixels."""


def _bmp(data: bytes) -> tuple[int, int, int]:
    offset, header = struct.unpack_from("<II", data, 10)
    if header == 12:
        width, height, _, depth = struct.unpack_from("<HHHH", data, 18)
    elif header in (40, 56, 108, 124):
        width, height, _, depth = struct.unpack_from("<iiHH", data, 18)
    else:
        raise RequestError("the BMP image is broken or of an unknown kind")
    height = abs(height)
    if width > 0 and offset + ((width * depth + 31) // 32 * 4) * height > len(data):
        raise IndexError
    return width, height, 1


def _webp(data: bytes) -> tuple[int, int, int]:
    """Return width, height, and 2: the decoder holds the pixels twice."""
    (size,) = struct.unpack_from("<I", data, 4)
    kind = data[12:16]
    if 8 + size > len(data):
        raise IndexError
    if kind == b"VP8X":
        low, high, low2, high2 = struct.unpack_from("<HBHB", data, 24)
        return (low | high << 16) + 1, (low2 | high2 << 16) + 1, 2
    if kind == b"VP8L" and data[20:21] == b"\x2f":
        (sides,) = struct.unpack_from("<I", data, 21)
        return (sides & 0x3FFF) + 1, (sides >> 14 & 0x3FFF) + 1, 2
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF, 2
    if len(data) < 30:
        raise IndexError
    raise RequestError("the WEBP image is broken: it has no size")


_READERS: tuple[tuple[bytes, ImageKind, Callable[[bytes], tuple[int, int, int]]], ...] = (
    (b"\x89PNG\r\n\x1a\n", "png", _png),
    (b"\xff\xd8", "jpeg", _jpeg),
    (b"GIF87a", "gif", _gif),
    (b"GIF89a", "gif", _gif),
    (b"BM", "bmp", _bmp),
    (b"RIFF", "webp", _webp),
)
"""Magic bytes, kind, and the function that returns width, height, and the cost of one pixel."""
