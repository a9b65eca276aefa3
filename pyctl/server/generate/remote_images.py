"""Images at addresses that clients name: only from the public network, so that nobody asks this one through us."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import time
from collections.abc import Iterable
from functools import cache
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from pyctl.errors import RequestError
from pyctl.limit import limit
from pyctl.text import reason_of

__all__ = ["fetch_image", "is_public"]

_MOST_BYTES = limit(10 * 2**20, "an image that is fetched", "400", "request", "bytes")
_MOST_SECONDS = limit(10.0, "what it takes to fetch an image", "400", "request", "s")
_MOST_REDIRECTS = limit(3, "redirects on the way to an image", "400", "request")
_MOST_LETTERS = limit(8_192, "an address of an image", "400", "request", "characters")

_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_EMBEDDED = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")))
"""IPv6 addresses that end in one of IPv4, to which a gateway may take us."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def fetch_image(url: str) -> bytes:
    """The bytes at ``url``, http or https, as far as they may be an image. Raises RequestError."""
    end = time.monotonic() + _MOST_SECONDS
    for _ in range(_MOST_REDIRECTS + 1):
        found = _fetch(url, end)
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise RequestError(f"the image is not there after {_MOST_REDIRECTS} redirects")


def is_public(address: Address) -> bool:
    """Whether ``address`` belongs to the public network, and to no machine or service of this one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and any(address in network for network in _EMBEDDED):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast and not address.is_reserved


def _fetch(url: str, end: float) -> bytes | str:
    """The bytes at ``url``, or where else to look."""
    headers = [("Host", _host(url)), ("Accept", "image/*"), ("Accept-Encoding", "identity"), ("User-Agent", "pyctl")]
    try:
        with (
            httpcore.ConnectionPool(_trusted(), max_connections=1, network_backend=_PublicNetwork(end)) as pool,
            pool.stream("GET", url, headers=headers) as response,
        ):
            if response.status in _REDIRECTS:
                return _header(response, b"location").decode("latin-1")
            if response.status != 200:
                raise RequestError(f"the address of the image answers with status {response.status}")
            if _header(response, b"content-encoding") not in (b"", b"identity"):
                raise RequestError("the image is not sent as it is")
            data = bytearray()
            for chunk in response.iter_stream():
                data += chunk
                if len(data) > _MOST_BYTES:
                    raise RequestError(f"the image has more than {_MOST_BYTES} bytes")
            return bytes(data)
    except httpcore.TimeoutException:
        raise RequestError(f"the image does not come within {_MOST_SECONDS:.0f} seconds") from None
    except (httpcore.NetworkError, httpcore.ProtocolError, OSError, ValueError) as error:
        raise RequestError(f"the image cannot be fetched: {_line(error)}") from None


def _host(url: str) -> str:
    """What a server is asked for by name. RequestError for what is no address of a web server."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        is_good = url.isascii() and url.isprintable() and " " not in url and len(url) <= _MOST_LETTERS
    except ValueError:
        is_good = False
    if not is_good or not host or parts.scheme not in ("http", "https") or "@" in parts.netloc:
        raise RequestError("the address of the image must be a plain http or https URL")
    name = f"[{host}]" if ":" in host else host
    return name if port is None else f"{name}:{port}"


def _header(response: httpcore.Response, name: bytes) -> bytes:
    return next((value for key, value in response.headers if key.lower() == name), b"")


def _line(error: Exception) -> str:
    return reason_of(error)[:200]


@cache
def _trusted() -> ssl.SSLContext:
    return httpcore.default_ssl_context()


class _PublicNetwork(httpcore.NetworkBackend):
    """Connects to the very address that was looked at, whatever a name stands for a moment later; until ``end``."""

    def __init__(self, end: float) -> None:
        self._network, self._end = httpcore.SyncBackend(), end

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        if not all(is_public(ipaddress.ip_address(each.partition("%")[0])) for each in found):
            raise RequestError("the address of the image is not in the public network")
        left = _left(self._end, httpcore.ConnectTimeout)
        return _TimedStream(self._network.connect_tcp(found[0], port, left, local_address, socket_options), self._end)


class _TimedStream(httpcore.NetworkStream):
    """What is sent and comes until ``end``, however slowly."""

    def __init__(self, stream: httpcore.NetworkStream, end: float) -> None:
        self._stream, self._end = stream, end

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._end, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._end, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = _left(self._end, httpcore.ConnectTimeout)
        return _TimedStream(self._stream.start_tls(ssl_context, server_hostname, left), self._end)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(end: float, timeout: type[Exception]) -> float:
    """Seconds until ``end``; ``timeout`` is raised if there are none."""
    left = end - time.monotonic()
    if left <= 0:
        raise timeout
    return left
