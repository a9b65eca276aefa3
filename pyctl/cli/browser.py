"""The page's address, and opening it in the browser of whoever started the server."""

from __future__ import annotations

import logging
import os
import sys
import threading
import webbrowser

__all__ = ["open_in_browser", "page_address"]

log = logging.getLogger("pyctl")


def page_address(addresses: str, prefix: str) -> str:
    """Where a browser on this machine finds the page of a server at ``addresses``, empty if only a socket has it."""
    for address in addresses.split(", "):
        if address.startswith("http"):
            # All interfaces are no place to go to.
            return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:") + prefix + "/"
    return ""


def open_in_browser(address: str) -> None:
    """Open ``address`` if there is a screen to show it on; returns at once.

    Without one, browsers for terminals would be started, in the middle of the log.
    """
    has_screen = sys.platform == "darwin" or any(map(os.environ.get, ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")))
    if not address or not has_screen:
        log.warning("--open: no browser here, the page is at %s", address or "no address that a browser can open")
        return
    threading.Thread(target=_open, args=(address,), name="pyctl-open", daemon=True).start()


def _open(address: str) -> None:
    if not webbrowser.open(address):
        log.warning("--open: no browser could be started, the page is at %s", address)
