"""Opening the page in a browser."""

from __future__ import annotations

import logging
import webbrowser
from queue import SimpleQueue

import pytest

from pyctl.cli.serve_command import open_in_browser
from pyctl.requests.request_pool import RequestPool


def test_only_a_screen_gets_a_browser(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = SimpleQueue[str]()
    monkeypatch.setattr(webbrowser, "open", opened.put)
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.WARNING):
        open_in_browser("http://h/", RequestPool())
    assert "the page is at http://h/" in caplog.text
    monkeypatch.setenv("DISPLAY", ":0")
    open_in_browser("", RequestPool())
    open_in_browser("http://h/", RequestPool())
    assert opened.get(timeout=60) == "http://h/"
    assert opened.empty()
