"""Opening the page in a browser."""

from __future__ import annotations

import logging
from functools import partial
from queue import SimpleQueue

import pytest

from pyctl.cli.serving import open_in_browser
from pyctl.requests.request_pool import RequestPool


def test_only_a_screen_gets_a_browser(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = SimpleQueue[str]()
    show = partial(open_in_browser, browser=opened.put, platform="linux")
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.WARNING):
        show("http://h/", RequestPool())
    assert "the page is at http://h/" in caplog.text
    monkeypatch.setenv("DISPLAY", ":0")
    show("", RequestPool())
    show("http://h/", RequestPool())
    assert opened.get(timeout=60) == "http://h/"
    assert opened.empty()
