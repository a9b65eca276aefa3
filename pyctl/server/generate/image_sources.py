"""Where the images of a request come from: the request itself, files that the server may show, or an address.

Addresses are fetched by threads of their own (`with_images`), so that a slow one keeps nobody else waiting.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from starlette.requests import Request

from pyctl.chat.images import ImageReader
from pyctl.chat.messages import unreadable
from pyctl.errors import ContextSizeError, RequestError
from pyctl.image_file import ImageFile
from pyctl.limit import limit
from pyctl.server.body import at_most
from pyctl.server.generate.remote_images import fetch_image
from pyctl.server.service import Service

__all__ = ["NOTHING", "Fetched", "ImagePart", "ImagesMissing", "data_images", "load_images", "with_images"]

R = TypeVar("R")

Fetched: TypeAlias = Mapping[str, bytes]
"""The files at addresses that a request names."""

NOTHING: Fetched = MappingProxyType({})

_MOST_IMAGES = limit(512, "images of a request", "400", "request")
_MOST_ADDRESSES = limit(16, "addresses of images in a request", "400", "request")
_MOST_BYTES = limit(32 * 2**20, "an image in a request or in a file", "400", "request", "bytes")

_MOST_PIXELS = limit(1_000_000_000, "pixels of all images of a request", "400", "request")

_STEP_LETTERS = 1 << 20
"""Base64 that is read at a time: whoever else wants the interpreter gets it in between."""


class ImagePart(dict[str, Any]):
    """A part of a message with the image at ``url``, in OpenAI's form, that knows its place ``at`` in the request."""

    def __init__(self, url: object, at: str) -> None:
        super().__init__(type="image_url", image_url={"url": url})
        self.at = at


class ImagesMissing(RequestError):
    """``addresses`` have to be fetched first; of each it is known where the request names it."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        super().__init__(f"{next(iter(addresses.values()))}: images are not fetched here")
        self.addresses = addresses


async def with_images(service: Service, request: Request, function: Callable[[Fetched], R]) -> R:
    """What ``function`` returns or raises, on a thread of the pool; it is called again when it said what is missing."""
    try:
        return await service.pool.run(request, function, NOTHING)
    except ImagesMissing as missing:
        fetched = await service.fetching.run(request, _fetch, missing.addresses)
    return await service.pool.run(request, function, fetched)


def load_images(messages: Any, service: Service, fetched: Fetched) -> Any:
    """``messages`` with an ImageFile in the place of each part that has an image; as they are where none can be seen.

    Raises RequestError, which says what is wrong with which image.
    """
    if service.chat.images is None or not isinstance(messages, list):
        return messages
    sources = _Sources(service, service.chat.images, fetched)
    loaded = [_loaded(message, f"messages[{index}]", sources) for index, message in enumerate(messages)]
    sources.check()
    return loaded


def data_images(values: Any, service: Service, fetched: Fetched) -> list[ImageFile]:
    """The images of ``multimodal_data``. Raises RequestError."""
    if service.chat.images is None:
        raise unreadable("'multimodal_data'", "multimodal_data")
    values = [values] if isinstance(values, str) else values
    if not isinstance(values, list):
        raise RequestError("'multimodal_data' must be a list of strings")
    sources = _Sources(service, service.chat.images, fetched)
    images = [sources.image(value, f"multimodal_data[{index}]") for index, value in enumerate(values)]
    sources.check()
    return [image for image in images if image is not None]


def _loaded(message: Any, at: str, sources: _Sources) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    parts = [_part(part, f"{at}.content[{index}]", sources) for index, part in enumerate(content)]
    return {**message, "content": parts}


def _part(part: Any, at: str, sources: _Sources) -> Any:
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return part
    if isinstance(part, ImagePart):
        at = part.at
    url = part.get("image_url")
    return sources.image(url.get("url") if isinstance(url, dict) else url, at)


class _Sources:
    """The images of one request. None is decoded before all are known to fit into a prompt."""

    def __init__(self, service: Service, reader: ImageReader, fetched: Fetched) -> None:
        self._media_path, self._n_ctx = service.settings.media_path, service.info.n_ctx
        self._reader, self._fetched = reader, fetched
        self._missing: dict[str, str] = {}
        self._found: list[tuple[ImageFile, str]] = []
        self._n_images = 0

    def image(self, url: Any, at: str) -> ImageFile | None:
        """The image that ``url`` says; None if it has to be fetched."""
        if not isinstance(url, str) or not url:
            raise RequestError(f"{at}: the url of an image must be a string")
        self._n_images += 1
        at_most(_MOST_IMAGES, self._n_images, "messages", "images")
        try:
            data = self._bytes(url)
            if data is None:
                self._missing.setdefault(url, at)
                at_most(_MOST_ADDRESSES, len(self._missing), "messages", "addresses of images")
                return None
            image = ImageFile.of(data)
            self._found.append((image, at))
            return image
        except RequestError as error:
            raise RequestError(f"{at}: {error}") from error

    def check(self) -> None:
        """Raise ImagesMissing if something is, ContextSizeError or RequestError if not all of them can be seen."""
        if self._missing:
            raise ImagesMissing(self._missing)
        n_tokens = sum(self._reader.n_tokens(image) for image, _ in self._found)
        if n_tokens >= self._n_ctx:
            raise ContextSizeError(n_tokens, self._n_ctx)
        if sum(image.width * image.height for image, _ in self._found) > _MOST_PIXELS:
            raise RequestError(f"the images of a request must have at most {_MOST_PIXELS} pixels together")
        for image, at in self._found:
            try:
                self._reader.picture(image)
            except RequestError as error:
                raise RequestError(f"{at}: {error}") from error

    def _bytes(self, url: str) -> bytes | None:
        scheme = url[:8].lower()
        if scheme.startswith(("http://", "https://")):
            return self._fetched.get(url)
        if scheme.startswith("file://"):
            return _file(url[7:], self._media_path)
        if not scheme.startswith("data:"):
            return _decoded(url)
        at = url.find(",", 0, _MOST_HEAD)
        if at < 0 or not url[:at].lower().endswith(";base64"):
            raise RequestError("a data URL must be of the form data:image/...;base64,...")
        return _decoded(url[at + 1 :])


_MOST_HEAD = 1000


def _decoded(text: str) -> bytes:
    """What ``text`` says in base64."""
    if len(text) // 4 * 3 > _MOST_BYTES + 2:
        raise RequestError(f"the image has more than {_MOST_BYTES} bytes")
    if any(blank in text for blank in " \n\r\t"):
        text = "".join(text.split())
    text = text.rstrip("=")
    found = bytearray()
    try:
        for at in range(0, len(text), _STEP_LETTERS):
            part = text[at : at + _STEP_LETTERS]
            found += base64.b64decode(part + "=" * (-len(part) % 4), validate=True)
    except ValueError:  # also of what is not ASCII
        raise RequestError("the image is no base64, and no address that is known") from None
    return bytes(found)


def _file(name: str, media_path: str) -> bytes:
    """The file ``name`` below ``media_path``, and nowhere else."""
    if not media_path:
        raise RequestError("file:// URLs are not allowed unless --media-path is specified")
    try:
        base = Path(media_path).resolve()
        path = (base / name.lstrip("/")).resolve()
        if not path.is_relative_to(base):
            raise RequestError(f"file path is not allowed: {name[:200]}")
        # Without waiting: a pipe would keep the thread until somebody writes into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise RequestError(f"{name[:200]} is no file")
            if facts.st_size > _MOST_BYTES:
                raise RequestError(f"the image has more than {_MOST_BYTES} bytes")
            return file.read(_MOST_BYTES)
    except (OSError, ValueError, RuntimeError):
        raise RequestError(f"file does not exist or cannot be opened: {name[:200]}") from None


def _fetch(addresses: Mapping[str, str]) -> dict[str, bytes]:
    found = {}
    for address, at in addresses.items():
        try:
            found[address] = fetch_image(address)
        except RequestError as error:
            raise RequestError(f"{at}: {error}") from error
    return found
