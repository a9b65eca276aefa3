"""The order of a start, and opening the page in a browser."""

from __future__ import annotations

import logging
from functools import partial
from queue import SimpleQueue
from unittest.mock import Mock

import pytest

from pyctl.cli import serve_command, serving
from pyctl.cli.arguments import CommandSettings, parse_serve
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


@pytest.mark.parametrize(
    ("model", "order"),
    [
        (["-m", "m.gguf"], ["load", "directory", "files", "serve"]),
        (["-hf", "org/model"], ["directory", "fetch", "load", "files", "serve"]),
        (["--models-dir", "."], ["directory", "files", "serve"]),
    ],
)
def test_a_load_begins_before_the_directory_is_tried_and_after_a_download(
    model: list[str], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache directory is tried once, and before a download, which may take minutes."""
    done: list[str] = []

    def step(name: str, settings: CommandSettings) -> CommandSettings:
        done.append(name)
        return settings

    def begin(settings: CommandSettings) -> Mock:
        done.append("load")
        return Mock()

    def serve(*_: object) -> int:
        done.append("serve")
        return 0

    monkeypatch.setattr(serve_command, "share_heaps", Mock())
    monkeypatch.setattr(serve_command, "start_log", Mock())
    monkeypatch.setattr(serve_command, "_with_cache", partial(step, "directory"))
    monkeypatch.setattr(serve_command, "resolve_files", partial(step, "fetch"))
    monkeypatch.setattr(serve_command, "check_files", partial(step, "files"))
    monkeypatch.setattr(serve_command, "ModelLoad", begin)
    monkeypatch.setattr(serving, "serve_models", serve)
    settings = parse_serve([*model, "--port", "0", "--no-kv-cache"], {})
    assert serve_command.run_serve(settings, model, {}) == 0
    assert done == order
