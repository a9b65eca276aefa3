"""Images at addresses of the public network, fetched so that no address leads to this one."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from pyctl.errors import RequestError
from pyctl.settings.limit import limit
from pyctl.text import error_text

__all__ = ["FetchRules", "fetch_image", "is_public"]

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
