"""Opening the page in a browser."""

from __future__ import annotations

import logging
import threading
import webbrowser

import pytest

from pyctl.cli.serve_command import open_in_browser
from pyctl.server.request_pool import RequestPool


def test_only_a_screen_gets_a_browser(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    opened: list[str] = []
    seen = threading.Event()

    def start(address: str) -> bool:
        opened.append(address)
        seen.set()
        return True

    monkeypatch.setattr(webbrowser, "open", start)
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.WARNING):
        open_in_browser("http://h/", RequestPool())
    assert "the page is at http://h/" in caplog.text
    monkeypatch.setenv("DISPLAY", ":0")
    open_in_browser("", RequestPool())
    open_in_browser("http://h/", RequestPool())
    assert seen.wait(60)
    assert opened == ["http://h/"]
