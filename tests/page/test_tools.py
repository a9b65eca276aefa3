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


CALLED = {"reasoning_budget_tokens": 0, "parallel_tool_calls": False}


def forced(name: str) -> dict[str, object]:
    """What makes every reply a call of the tool ``name``, and nothing before it."""
    return {**CALLED, "tool_choice": {"type": "function", "function": {"name": name}}}


def short() -> dict[str, object]:
    """What makes every reply some words without a call."""
    return {**CALLED, "tool_choice": "none", "max_tokens": 8}


def runs(tab: Tab) -> list[str]:
    """The names of the tools that the page has had the server run."""
    asked = [each for each in tab.requests if each.url.endswith("/tools") and each.method == "POST"]
    return [json.loads(each.post_data or "")["tool"] for each in asked]


def test_a_call_is_confirmed_and_run_and_each_token_evaluated_once(tab: Tab) -> None:
    page = tab.page
    assert page.locator("#tools").inner_text() == "Tools 2"
    first = tab.say("Where are we?", forced("get_info"))
    call = tab.replies.last.locator(".call")
    assert "get_info · reads only" in " ".join(call.inner_text().split())
    assert not runs(tab)

    second = tab.act(call.get_by_role("button", name="Run once"))
    assert tab.replies.count() == 2
    result = page.locator(".message.tool details.file")
    assert result.get_attribute("open") is None
    assert "Result of get_info" in result.inner_text()
    result.locator("summary").click()
    assert str(Path.cwd()) in result.locator("pre").inner_text()
    # All of the prompt and the reply before, but for its last token, which no reply evaluates.
    assert second["cache_n"] >= first["prompt_n"] + first["predicted_n"] - 1
    assert tab.replies.last.get_by_role("button", name="Run once").is_visible()
    assert runs(tab) == ["get_info"]


def until_called(tab: Tab, n_calls: int) -> None:
    """Wait for the results of ``n_calls`` calls."""
    tab.until(lambda: tab.page.locator(".message.tool").count() >= n_calls)


def test_what_is_allowed_in_a_chat_runs_there_until_it_is_stopped(tab: Tab) -> None:
    tab.say("Where are we?", forced("get_info"))
    tab.replies.last.get_by_role("button", name="Allow in this chat").click()  # runs again and again
    until_called(tab, 3)
    tab.page.keyboard.press("Escape")
    tab.until_idle()
    n_calls = len(runs(tab))
    assert not tab.page.locator(".message .error").count()
    tab.reload()
    assert tab.page.locator(".message.tool").count() in (n_calls - 1, n_calls)  # the last one may have been stopped
    assert len(runs(tab)) == n_calls

    tab.page.get_by_role("button", name="New chat").click()
    tab.say("And here?", forced("get_info"))
    assert tab.replies.last.get_by_role("button", name="Run once").is_visible()
    assert len(runs(tab)) == n_calls


def test_what_is_always_allowed_runs_after_a_reload_and_in_other_chats(tab: Tab) -> None:
    tab.say("Where are we?", forced("get_info"))
    tab.configure(json=json.dumps(short()))
    tab.act(tab.replies.last.get_by_role("button", name="Always allow"))
    assert runs(tab) == ["get_info"]
    assert tab.replies.count() == 2
    tab.reload()
    tab.page.get_by_role("button", name="New chat").click()
    tab.begin("And here?", forced("get_info"))
    until_called(tab, 2)
    tab.page.keyboard.press("Escape")
    tab.until_idle()
    assert set(runs(tab)) == {"get_info"}
    tab.say("Write.", forced("write_file") | {"max_tokens": 64})
    assert "write_file" not in runs(tab), "it was not allowed"
    tab.page.locator("#tools").click()
    assert tab.page.locator('#dialog [name="get_info"]').input_value() == "always"


def test_nothing_comes_between_a_reply_and_its_calls(tab: Tab) -> None:
    """Not what the page asks of the cache after each reply: Escape would find nothing to stop, and Enter would send."""
    tab.page.evaluate("localStorage.setItem('tools', JSON.stringify({ get_info: 'always' }))")
    tab.reload()
    tab.page.route("**/cache?*", lambda route: None)  # never answered
    tab.page.evaluate(
        """() => {
          window.idle = 0;
          const send = document.querySelector("#send"), note = () => (idle += !send.matches(".stop"));
          new MutationObserver(note).observe(send, { attributes: true, childList: true });
        }"""
    )
    tab.begin("Where are we?", forced("get_info"))
    until_called(tab, 3)
    assert tab.page.evaluate("idle") == 0
    tab.page.keyboard.press("Escape")
    tab.until_idle()
    assert tab.page.evaluate("idle") == 1


def test_a_refused_call_does_not_run_and_what_is_off_is_not_offered(tab: Tab) -> None:
    page = tab.page
    tab.say("Where are we?", forced("get_info"))
    tab.configure(json=json.dumps(short()))
    with page.expect_request("**/v1/chat/completions") as asked:
        tab.replies.last.get_by_role("button", name="Refuse").click()
    body = json.loads(asked.value.post_data or "")
    assert body["messages"][-1]["content"] == "The user refused this call."
    assert [tool["function"]["name"] for tool in body["tools"]] == ["write_file", "get_info"]
    tab.until_idle()
    assert not runs(tab)

    page.locator("#tools").click()
    page.locator('#dialog [name="write_file"]').select_option("off")
    page.get_by_role("button", name="Done").click()
    tab.until_closed()
    assert page.locator("#tools").inner_text() == "Tools 1"
    tab.reload()
    assert page.locator("#tools").inner_text() == "Tools 1"
