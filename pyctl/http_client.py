"""HTTP clients that go through the proxy of the environment, but not to this machine itself."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

import httpx

from pyctl.errors import ConfigError

__all__ = ["http_client", "is_loopback"]

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def is_loopback(host: str) -> bool:
    """Return whether ``host``, a name or an address with or without brackets, is this machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def http_client(url: str, **options: Any) -> httpx.Client:
    """Return a client for requests to ``url`` and its redirects; ``options`` are httpx's.

    `http_proxy`, `https_proxy` and `all_proxy` apply as usual, except to loopback addresses, which
    no proxy reaches. Raises ConfigError for a proxy that cannot be used.
    """
    try:
        host = httpx.URL(url).host
    except httpx.InvalidURL:  # which the first request reports
        host = ""
    own = (f"[{host}]" if ":" in host else host,) if is_loopback(host) else ()
    direct: Mapping[str, None] = {f"all://{each}": None for each in (*_LOOPBACK, *own)}
    try:
        return httpx.Client(mounts=direct, **options)
    # The names of httpx's faults: a scheme that it does not have, no library for SOCKS, no address
    # at all.
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        if own:  # the proxy is not needed
            return httpx.Client(trust_env=False, **options)
        raise ConfigError(
            f"the proxy of the environment (http_proxy, https_proxy, all_proxy): {error}"
        ) from error
