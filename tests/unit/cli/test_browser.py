"""The address of the page, and opening it."""

from __future__ import annotations

import logging
import threading
import webbrowser

import pytest

from pyctl.cli.serve_command import open_in_browser, page_address


@pytest.mark.parametrize(
    ("addresses", "prefix", "page"),
    [
        ("http://127.0.0.1:8080", "", "http://127.0.0.1:8080/"),
        ("http://0.0.0.0:8080, http://10.0.0.1:8080", "/llm", "http://127.0.0.1:8080/llm/"),
        ("https://[::]:8080", "", "https://[::1]:8080/"),
        ("unix:///run/a.sock, http://10.0.0.1:80", "", "http://10.0.0.1:80/"),
        ("unix:///run/a.sock", "", ""),
    ],
)
def test_where_a_browser_finds_the_page(addresses: str, prefix: str, page: str) -> None:
    assert page_address(addresses, prefix) == page


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
        open_in_browser("http://h/")
    assert "the page is at http://h/" in caplog.text
    monkeypatch.setenv("DISPLAY", ":0")
    open_in_browser("")
    open_in_browser("http://h/")
    assert seen.wait(60)
    assert opened == ["http://h/"]
