"""Image files for tests."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from pyctl.files.image_file import ImageFile
from pyctl.prompt import ImageSpan


def image_bytes(
    width: int = 64, height: int = 48, kind: str = "png", *, seed: int = 0, **options: Any
) -> bytes:
    """Return a file with random pixels; ``options`` are Pillow's."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


class GridReader:
    """An `ImageReader` without an encoder: a token for each 32 x 32 pixels, between the tokens 1
    and 2.
    """

    rows: Any = None  # as an encoder has them

    around = (np.array([1], np.int32), np.array([2], np.int32))

    def n_tokens(self, image: ImageFile) -> int:
        return self.picture(image).n_tokens

    def picture(self, image: ImageFile) -> ImageSpan:
        columns = -(-image.width // 32)
        lines = -(-image.height // 32)
        return ImageSpan(image.data, columns, lines, image)
