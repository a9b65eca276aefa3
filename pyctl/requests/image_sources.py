"""Images of a request: in it, in files that the server may show, or at addresses of the public
network.

Those are fetched by `RequestPool.read` on separate threads, so that a slow one delays no other
request.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from pyctl.chat.images import ImageReader
from pyctl.chat.messages import unreadable
from pyctl.errors import ContextSizeError, RequestError
from pyctl.files.image_file import ImageFile
from pyctl.requests.body_reader import at_most
from pyctl.requests.request_pool import Fetched, FilesMissing
from pyctl.settings.limit import limit
from pyctl.text import error_text

__all__ = [
    "FetchRules",
    "ImageLimits",
    "ImagePart",
    "ImageSources",
    "data_images",
    "fetch_image",
    "is_public",
    "load_images",
]

# -- images at addresses of the public network
# ----------------------------------------------------------------------------------

_MAX_FETCHED_BYTES = limit(
    10 * 2**20, "an image fetched from an address", "400", "request", "bytes"
)
_MAX_SECONDS = limit(10.0, "time to fetch an image", "400", "request", "s")
_MAX_REDIRECTS = limit(3, "redirects on the way to an image", "400", "request")
_MAX_CHARS = limit(8_192, "an address of an image", "400", "request", "characters")

_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_EMBEDDED = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")))
"""IPv6 addresses that end in one of IPv4, to which a gateway may take us."""

_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All IPv6 addresses of the public network; Python counts fec0::/10, which are a site's own, and
unknown ones.
"""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def fetch_image(url: str, rules: FetchRules | None = None) -> bytes:
    """Return the bytes at ``url``, http or https, if they may be an image. Raises RequestError."""
    rules = rules or FetchRules()
    end = time.monotonic() + rules.max_seconds
    for _ in range(_MAX_REDIRECTS + 1):
        answer = _fetch_one(url, end, rules)
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer)
    raise RequestError(f"the address of the image redirects more than {_MAX_REDIRECTS} times")


def is_public(address: Address) -> bool:
    """Return whether ``address`` belongs to the public network, and to no machine or service of
    this one.
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and any(address in network for network in _EMBEDDED):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address not in _UNICAST:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


@dataclass(frozen=True)
class FetchRules:
    """The addresses from which images may come, and the limits of one fetch.

    Attributes:
        is_allowed: Returns whether an image may come from an address.
        resolve: Returns the addresses of a name and a port, as `socket.getaddrinfo` does.
        max_bytes: The maximum bytes of an image.
        max_seconds: The maximum seconds of a fetch, redirects included.
    """

    is_allowed: Callable[[Address], bool] = is_public
    resolve: Callable[..., Sequence[Any]] = socket.getaddrinfo
    max_bytes: int = _MAX_FETCHED_BYTES
    max_seconds: float = _MAX_SECONDS


def _fetch_one(url: str, end: float, rules: FetchRules) -> bytes | str:
    """Return the bytes at ``url``, or the address that it redirects to."""
    headers = [
        ("Host", _host(url)),
        ("Accept", "image/*"),
        ("Accept-Encoding", "identity"),
        ("User-Agent", "pyctl"),
    ]
    try:
        with (
            httpcore.ConnectionPool(
                _trusted(), max_connections=1, network_backend=_PublicNetwork(end, rules)
            ) as pool,
            pool.stream("GET", url, headers=headers) as response,
        ):
            if response.status in _REDIRECTS:
                return _header(response, b"location").decode("latin-1")
            if response.status != 200:
                raise RequestError(f"the address of the image returned status {response.status}")
            if _header(response, b"content-encoding") not in (b"", b"identity"):
                raise RequestError("the image must be sent without content encoding")
            data = bytearray()
            for chunk in response.iter_stream():
                data += chunk
                if len(data) > rules.max_bytes:
                    raise RequestError(f"the image has more than {rules.max_bytes} bytes")
            return bytes(data)
    except httpcore.TimeoutException:
        seconds = f"{rules.max_seconds:.0f} seconds"
        raise RequestError(f"the image did not arrive within {seconds}") from None
    except (httpcore.NetworkError, httpcore.ProtocolError, OSError, ValueError) as error:
        raise RequestError(f"cannot fetch the image: {error_text(error)[:200]}") from None


def _host(url: str) -> str:
    """Return the parts of an address. Raises RequestError if it is not a web server's."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port
        is_good = url.isascii() and url.isprintable() and " " not in url and len(url) <= _MAX_CHARS
    except ValueError:
        is_good = False
    if not is_good or not host or parts.scheme not in ("http", "https") or "@" in parts.netloc:
        raise RequestError("the address of the image must be a plain http or https URL")
    name = f"[{host}]" if ":" in host else host
    return name if port is None else f"{name}:{port}"


def _header(response: httpcore.Response, name: bytes) -> bytes:
    return next((value for key, value in response.headers if key.lower() == name), b"")


@cache
def _trusted() -> ssl.SSLContext:
    return httpcore.default_ssl_context()


class _PublicNetwork(httpcore.NetworkBackend):
    """A network that connects to the very address that was checked, whatever a name stands for a
    moment later; until ``end``.
    """

    def __init__(self, end: float, rules: FetchRules) -> None:
        self._network = httpcore.SyncBackend()
        self._end = end
        self._rules = rules

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first address of ``host``, within the seconds until the end.

        All addresses are checked before, so that a name with one private address is refused as a
        whole. Raises RequestError.
        """
        found = self._rules.resolve(host, port, type=socket.SOCK_STREAM)
        addresses = [str(info[4][0]) for info in found]
        is_allowed = self._rules.is_allowed
        if not all(
            is_allowed(ipaddress.ip_address(address.partition("%")[0])) for address in addresses
        ):
            raise RequestError("the address of the image is not in the public network")
        seconds = _seconds_until(self._end, httpcore.ConnectTimeout)
        return _TimedStream(
            self._network.connect_tcp(addresses[0], port, seconds, local_address, socket_options),
            self._end,
        )


class _TimedStream(httpcore.NetworkStream):
    """A stream that ends at ``end``, however slow it is."""

    def __init__(self, stream: httpcore.NetworkStream, end: float) -> None:
        self._stream = stream
        self._end = end

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _seconds_until(self._end, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _seconds_until(self._end, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        seconds = _seconds_until(self._end, httpcore.ConnectTimeout)
        return _TimedStream(
            self._stream.start_tls(ssl_context, server_hostname, seconds), self._end
        )

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _seconds_until(end: float, timeout: type[Exception]) -> float:
    """Return the seconds until ``end``. Raises ``timeout`` if there are none."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise timeout
    return seconds


# -- images of a request
# ----------------------------------------------------------------------------------

_MAX_IMAGES = limit(512, "images of a request", "400", "request")
_MAX_ADDRESSES = limit(16, "addresses of images in a request", "400", "request")
_MAX_BYTES = limit(32 * 2**20, "an image in a request or in a file", "400", "request", "bytes")

_MAX_PIXELS = limit(1_000_000_000, "pixels of all images of a request", "400", "request")

_STEP_CHARS = 1 << 20
"""Base64 that is decoded at a time: other threads get the interpreter in between."""


@dataclass(frozen=True)
class ImageLimits:
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
    fetched = {}
    for address, where in addresses.items():
        try:
            fetched[address] = fetch_image(address)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from error
    return fetched
