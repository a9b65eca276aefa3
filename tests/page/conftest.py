"""A browser and a server that all tests here share. Without a browser they are skipped, unless
CHROMIUM names one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from tests.page.browser import PATIENCE_MS, Tab, browser_path

if TYPE_CHECKING:  # it may be missing
    from playwright.sync_api import Browser

SERVE = (*PYCTL_SERVE, "-t", "1", "-c", "16384", "--temp", "0", "-n", "256")
"""The command of a server on the built-in model. Its replies to some texts would go on until the
context is full, so ``-n`` ends them.
"""


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Yield Chromium without a window."""
    wanted = os.environ.get("CHROMIUM")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        assert not wanted, "CHROMIUM is set, but playwright is not installed: pip install '.[page]'"
        pytest.skip("no playwright: pip install '.[page]' to test the page in a browser")
    path = browser_path()
    if path is None:
        assert not wanted, f"CHROMIUM is {wanted}, which is no program"
        pytest.skip(
            "no chromium: install one, or name it in CHROMIUM, to test the page in a browser"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"], timeout=2 * PATIENCE_MS
        )
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yield a server that all tests share; what they say to it differs."""
    with ServerProcess(SERVE, tmp_path_factory.mktemp("page") / "log") as server:
        yield server


OpenTab = Callable[..., Tab]


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[OpenTab]:
    """open_tab(url, options) -> a tab with the page; after the test none of them may have had a
    problem.
    """
    tabs: list[Tab] = []

    def open_one(url: str, options: Mapping[str, Any] | None = None, ready: bool = True) -> Tab:
        tabs.append(Tab(browser, url, options))
        return tabs[-1].open() if ready else tabs[-1]

    yield open_one
    for tab in tabs:
        tab.close()
    for tab in tabs:
        tab.check()


@pytest.fixture
def tab(open_tab: OpenTab, server: ServerProcess) -> Tab:
    """Return the page of the shared server, with nothing in it."""
    return open_tab(server.url)
