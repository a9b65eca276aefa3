"""Images of a request: in it, in files that the server may show, or at addresses of the public
network.

`RequestPool.read` fetches those at addresses on separate threads, so that a slow one delays no
other request: see `pyctl.requests.remote_images`.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pyctl.chat.images import ImageReader
from pyctl.chat.messages import unreadable
from pyctl.errors import ContextSizeError, RequestError
from pyctl.files.image_file import ImageFile
from pyctl.requests.body_reader import at_most
from pyctl.requests.request_pool import Fetched, FilesMissing
from pyctl.settings.limit import limit

__all__ = [
    "ImageLimits",
    "ImagePart",
    "ImageSources",
    "data_images",
    "load_images",
]

_MAX_IMAGES = limit(512, "images of a request", "400", "request")
_MAX_ADDRESSES = limit(16, "addresses of images in a request", "400", "request")
_MAX_BYTES = limit(32 * 2**20, "an image in a request or in a file", "400", "request", "bytes")

_MAX_PIXELS = limit(1_000_000_000, "pixels of all images of a request", "400", "request")

_STEP_CHARS = 1 << 20
"""Base64 that is decoded at a time: other threads get the interpreter in between."""


class ImageLimits(msgspec.Struct, frozen=True):
    """Limits of the images in a request.

    Attributes:
        max_bytes: The maximum bytes of an image.
        max_pixels: The maximum pixels of all images.
        step_chars: The characters of base64 that are decoded at a time.
    """

    max_bytes: int = _MAX_BYTES
    max_pixels: int = _MAX_PIXELS
    step_chars: int = _STEP_CHARS


class ImagePart(dict[str, Any]):
    """A part of a message with the image at ``url``, in OpenAI's form; ``where`` is its place in
    the request.
    """

    def __init__(self, url: object, where: str) -> None:
        super().__init__(type="image_url", image_url={"url": url})
        self.where = where


def load_images(messages: Any, sources: ImageSources | None) -> Any:
    """Return ``messages`` with an ImageFile in place of each image; unchanged without ``sources``,
    for a model that reads no images.

    Raises RequestError, which names the image and its fault.
    """
    if sources is None or not isinstance(messages, list):
        return messages
    loaded = [
        _loaded(message, f"messages[{index}]", sources) for index, message in enumerate(messages)
    ]
    sources.check()
    return loaded


def data_images(values: Any, sources: ImageSources | None) -> list[ImageFile]:
    """Return the images of ``multimodal_data``. Raises RequestError, also without ``sources``, for
    a model that reads no images.
    """
    if sources is None:
        raise unreadable("'multimodal_data'", "multimodal_data")
    values = [values] if isinstance(values, str) else values
    if not isinstance(values, list):
        raise RequestError("'multimodal_data' must be a list of strings")
    images = [
        sources.image(value, f"multimodal_data[{index}]") for index, value in enumerate(values)
    ]
    sources.check()
    return [image for image in images if image is not None]


def _loaded(message: Any, where: str, sources: ImageSources) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    parts = [
        _part(part, f"{where}.content[{index}]", sources) for index, part in enumerate(content)
    ]
    return {**message, "content": parts}


def _part(part: Any, where: str, sources: ImageSources) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("image", "input_image"):
        raise RequestError(f"{where}: an image must be a part of type image_url, not {kind}")
    if kind != "image_url":
        return part
    if isinstance(part, ImagePart):
        where = part.where
    url = part.get("image_url")
    return sources.image(url.get("url") if isinstance(url, dict) else url, where)


class ImageSources:
    """The images of one request. None is decoded before all are known to fit into a prompt."""

    def __init__(
        self,
        reader: ImageReader,
        fetched: Fetched,
        *,
        n_ctx: int,
        media_path: str,
        limits: ImageLimits = ImageLimits(),
    ) -> None:
        """Find the images for ``reader``, within a context of ``n_ctx`` tokens.

        ``fetched`` has those at addresses. Files must be below ``media_path``, empty for none.
        """
        self._limits = limits
        self._reader = reader
        self._fetched = fetched
        self._n_ctx = n_ctx
        self._media_path = media_path
        self._missing: dict[str, str] = {}
        self._found: list[tuple[ImageFile, str]] = []
        self._n_images = 0

    def image(self, url: Any, where: str) -> ImageFile | None:
        """Return the image in ``url``; None if it has to be fetched. Raises RequestError."""
        if not isinstance(url, str) or not url:
            raise RequestError(f"{where}: the url of an image must be a string")
        self._n_images += 1
        at_most(_MAX_IMAGES, self._n_images, "messages", "images")
        try:
            data = self._bytes(url)
            if data is None:
                self._missing.setdefault(url, where)
                at_most(_MAX_ADDRESSES, len(self._missing), "messages", "addresses of images")
                return None
            image = ImageFile.parse(data)
            self._found.append((image, where))
            return image
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from error

    def check(self) -> None:
        """Raise FilesMissing if an image is missing, ContextSizeError or RequestError if the images
        do not fit or cannot be read.
        """
        if self._missing:
            raise FilesMissing(self._missing, _fetch_all)
        n_tokens = sum(self._reader.n_tokens(image) for image, _ in self._found)
        if n_tokens >= self._n_ctx:
            raise ContextSizeError(n_tokens, self._n_ctx)
        max_pixels = self._limits.max_pixels
        if sum(image.width * image.height for image, _ in self._found) > max_pixels:
            raise RequestError(
                f"the images of a request must have at most {max_pixels} pixels together"
            )
        for image, where in self._found:
            try:
                self._reader.picture(image)
            except RequestError as error:
                raise RequestError(f"{where}: {error}") from error

    def _bytes(self, url: str) -> bytes | None:
        scheme = url[:8].lower()
        if scheme.startswith(("http://", "https://")):
            return self._fetched.get(url)
        if scheme.startswith("file://"):
            return _file(url[7:], self._media_path, self._limits.max_bytes)
        if not scheme.startswith("data:"):
            return _decoded(url, self._limits)
        comma = url.find(",", 0, _MAX_HEAD)
        if comma < 0 or not url[:comma].lower().endswith(";base64"):
            raise RequestError("a data URL must be of the form data:image/...;base64,...")
        return _decoded(url[comma + 1 :], self._limits)


_MAX_HEAD = 1000


def _decoded(text: str, limits: ImageLimits) -> bytes:
    """Return the bytes of ``text`` in base64."""
    if len(text) // 4 * 3 > limits.max_bytes + 2:
        raise RequestError(f"the image has more than {limits.max_bytes} bytes")
    if any(blank in text for blank in " \n\r\t"):
        text = "".join(text.split())
    text = text.rstrip("=")
    data = bytearray()
    try:
        for start in range(0, len(text), limits.step_chars):
            part = text[start : start + limits.step_chars]
            data += base64.b64decode(part + "=" * (-len(part) % 4), validate=True)
    except ValueError:  # also of other characters than ASCII
        raise RequestError("the image must be base64 or a data, http, https or file URL") from None
    return bytes(data)


def _file(name: str, media_path: str, max_bytes: int) -> bytes:
    """Return the file ``name`` below ``media_path``, and nowhere else."""
    if not media_path:
        raise RequestError("file:// URLs are not allowed unless --media-path is specified")
    try:
        base = Path(media_path).resolve()
        path = (base / name.lstrip("/")).resolve()
        if not path.is_relative_to(base):
            raise RequestError(f"file path is not allowed: {name[:200]}")
        # Without waiting: a pipe would keep the thread until it is written to.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise RequestError(f"{name[:200]} is not a file")
            if facts.st_size > max_bytes:
                raise RequestError(f"the image has more than {max_bytes} bytes")
            return file.read(max_bytes)
    except (OSError, ValueError, RuntimeError):
        raise RequestError(f"file does not exist or cannot be opened: {name[:200]}") from None


def _fetch_all(addresses: Mapping[str, str]) -> dict[str, bytes]:
    """Return the image at each of ``addresses``, which have a place in the request. Raises
    RequestError, which names the place.
    """
    # Only now: few requests name addresses, and the HTTP client is 30 modules.
    from pyctl.requests.remote_images import fetch_image

    fetched = {}
    for address, where in addresses.items():
        try:
            fetched[address] = fetch_image(address)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from error
    return fetched
