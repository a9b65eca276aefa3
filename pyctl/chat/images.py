"""Images within text: each is a mark in it, from a message to the tokens of the prompt.

Templates see text only. A mark names its image and cannot be guessed, so no text of a client is
ever taken for an image. Answers as text show it as `MEDIA_MARKER`, as llama-server does.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Protocol

from pyctl.errors import RequestError
from pyctl.files.image_file import ImageFile
from pyctl.prompt import ImageSpan, Tokens

__all__ = [
    "BEGIN",
    "MEDIA_MARKER",
    "ImageReader",
    "image_mark",
    "joined_parts",
    "split_marked",
    "split_marker",
    "with_media_markers",
]

MEDIA_MARKER = os.environ.get("LLAMA_MEDIA_MARKER") or f"<__media_{secrets.token_urlsafe(24)}__>"
"""The text in place of an image in the prompt of a completion, and in prompts as text."""

BEGIN = f"<__image_{secrets.token_hex(16)}_"
"""The start of a mark; of this process only, so that no text of a client contains one."""
_END = "__>"
"""The end of a mark."""
_DIGITS = 32


class ImageReader(Protocol):
    """A converter of images to parts of prompts. Thread-safe."""

    @property
    def around(self) -> tuple[Tokens, Tokens]:
        """The tokens before and after each image."""
        ...

    def n_tokens(self, image: ImageFile) -> int:
        """Return the number of tokens that ``image`` takes, judged only by its size."""
        ...

    def picture(self, image: ImageFile) -> ImageSpan:
        """Return ``image`` as the model reads it. A new one is decoded; RequestError if that
        fails.
        """
        ...


def image_mark(image: ImageFile) -> str:
    """Return the mark of ``image`` in text, in this process; the same for the same bytes."""
    return f"{BEGIN}{image.digest.hex()}{_END}"


def joined_parts(parts: Sequence[str | ImageFile]) -> str:
    """Return the content of a message with images as text: as in llama-server, a line for each
    text, but no line end at an image.
    """
    text = ""
    after_image = True
    for part in parts:
        is_image = isinstance(part, ImageFile)
        text += (
            image_mark(part)
            if isinstance(part, ImageFile)
            else part
            if after_image
            else f"\n{part}"
        )
        after_image = is_image or not text
    return text


def split_marked(text: str, images: Mapping[str, ImageFile]) -> list[str | ImageFile]:
    """Return ``text`` in pieces: text, and the ``images`` whose marks are in it."""
    first, *rest = text.split(BEGIN)
    pieces: list[str | ImageFile] = [first]
    for piece in rest:
        n = _DIGITS + len(_END)
        image = images.get(BEGIN + piece[:n])
        pieces += [BEGIN + piece] if image is None else [image, piece[n:]]
    return pieces


def split_marker(text: str, images: Sequence[ImageFile]) -> list[str | ImageFile]:
    """Return ``text`` in pieces, with one of ``images`` for each `MEDIA_MARKER`. Raises
    RequestError if their numbers differ.
    """
    texts = text.split(MEDIA_MARKER)
    if len(texts) != len(images) + 1:
        n = len(texts) - 1
        maximum = len(images)
        raise RequestError(
            f"the prompt has {n} times the media_marker of /props for {maximum} images"
        )
    pieces: list[str | ImageFile] = [texts[0]]
    for image, piece in zip(images, texts[1:], strict=True):
        pieces += [image, piece]
    return pieces


def with_media_markers(text: str, images: Mapping[str, ImageFile]) -> str:
    """Return ``text`` with a `MEDIA_MARKER` for each image."""
    if not images:
        return text
    return "".join(
        MEDIA_MARKER if isinstance(piece, ImageFile) else piece
        for piece in split_marked(text, images)
    )
