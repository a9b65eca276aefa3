"""Tools in the page: a call is shown, confirmed and run, and the model goes on with its result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pyctl.measure.server_process import ServerProcess
from tests.page.browser import Tab
from tests.page.conftest import SERVE, OpenTab

if TYPE_CHECKING:  # it may be missing
    from playwright.sync_api import Browser


@pytest.fixture
def tab(browser: Browser, open_tab: OpenTab, tmp_path: Path) -> Iterator[Tab]:
    """The page of a server with two tools."""
    with ServerProcess((*SERVE, "--tools", "get_info,write_file"), tmp_path / "log") as server:
        tab = open_tab(server.url)
        yield tab
        tab.close()


def forced(name: str) -> dict[str, object]:
    """What makes every reply a call of the tool ``name`` and nothing else: thoughts of this model may have no end."""
    return {"tool_choice": {"type": "function", "function": {"name": name}}, "thinking_budget_tokens": 0}


def test_a_call_is_confirmed_and_run_and_each_token_evaluated_once(tab: Tab) -> None:
    page = tab.page
    assert page.locator("#tools").inner_text() == "Tools 2"
    first = tab.say("Where are we?", forced("get_info"))
    call = tab.replies.last.locator(".call")
    assert "get_info · reads only" in " ".join(call.inner_text().split())
    assert not any(request.url.endswith("/tools") and request.method == "POST" for request in tab.requests)

    second = tab.act(call.get_by_role("button", name="Run once"))
    tab.until(lambda: tab.replies.count() == 2)
    result = page.locator(".message.tool details.file")
    assert result.get_attribute("open") is None
    assert "Result of get_info" in result.inner_text()
    result.locator("summary").click()
    assert str(Path.cwd()) in result.locator("pre").inner_text()
    # All of the prompt and the reply before, but for its last token, which no reply evaluates.
    assert second["cache_n"] >= first["prompt_n"] + first["predicted_n"] - 1

    with page.expect_response(lambda found: found.url.endswith("/tools") and found.request.method == "POST"):
        tab.configure(json='{"max_tokens": 16}')
        tab.replies.last.get_by_role("button", name="Allow in this chat").click()
    tab.until_idle()
    tab.until(lambda: tab.replies.count() == 3)

    tab.begin("Once more.", forced("get_info"))  # runs without a question, again and again, until it is stopped
    tab.until(lambda: page.locator(".message.tool").count() >= 5)
    page.keyboard.press("Escape")
    tab.until(lambda: not page.locator("#send.stop").count())
    tab.reload()
    assert page.locator(".message.tool").count() >= 5
    assert not page.locator(".message .error").count()


def test_a_refused_call_does_not_run_and_what_is_off_is_not_offered(tab: Tab) -> None:
    page = tab.page
    tab.say("Where are we?", forced("get_info"))
    with page.expect_request("**/v1/chat/completions") as asked:
        tab.replies.last.get_by_role("button", name="Refuse").click()
    body = json.loads(asked.value.post_data or "")
    assert body["messages"][-1]["content"] == "The user refused this call."
    assert [tool["function"]["name"] for tool in body["tools"]] == ["write_file", "get_info"]
    tab.until_idle()
    assert not any(request.url.endswith("/tools") and request.method == "POST" for request in tab.requests)

    page.locator("#tools").click()
    page.locator('#dialog [name="write_file"]').select_option("off")
    page.get_by_role("button", name="Done").click()
    tab.until_closed()
    assert page.locator("#tools").inner_text() == "Tools 1"
    tab.reload()
    assert page.locator("#tools").inner_text() == "Tools 1"
