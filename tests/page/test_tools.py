"""Tools in the page: a call is shown, confirmed and run, and the model goes on with its result."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pyctl.measure.server_process import ServerProcess
from tests.client import Client
from tests.page.browser import Tab
from tests.page.conftest import SERVE, OpenTab
from tests.page.test_looks import findings, load_axe
from tests.unit.mcp import test_mcp_client
from tests.waiting import until

if TYPE_CHECKING:  # it may be missing
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def with_tools(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Yield a server with two tools."""
    child = {"command": sys.executable, "args": [test_mcp_client.CHILD, "place", "note"]}
    flags = ("--mcp-servers-json", json.dumps({"mcpServers": {"child": child}}))
    with ServerProcess((*SERVE, *flags), tmp_path_factory.mktemp("tools") / "log") as server:
        # It serves before the child has listed its tools.
        until(lambda: Client.to_server(server.url).get_json("/tools"))
        yield server


@pytest.fixture
def tab(open_tab: OpenTab, with_tools: ServerProcess) -> Tab:
    """Return the page of that server."""
    return open_tab(with_tools.url)


CALLED = {"reasoning_budget_tokens": 0, "parallel_tool_calls": False}


def forced(name: str) -> dict[str, object]:
    """Return fields that make every reply a call of the tool ``name``, with no text before it."""
    return {**CALLED, "tool_choice": {"type": "function", "function": {"name": name}}}


def short() -> dict[str, object]:
    """Return fields that make every reply some words without a call."""
    return {**CALLED, "tool_choice": "none", "max_tokens": 8}


def runs(tab: Tab) -> list[str]:
    """Return the names of the tools that the page has had the server run."""
    asked = [each for each in tab.requests if each.url.endswith("/tools") and each.method == "POST"]
    return [json.loads(each.post_data or "")["tool"] for each in asked]


def test_a_call_is_confirmed_and_run_and_each_token_evaluated_once(tab: Tab) -> None:
    """A call runs after a click and not before; the turn with its result evaluates the result
    alone.
    """
    page = tab.page
    assert page.locator("#tools").inner_text() == "Tools 2"
    first = tab.say("Where are we?", forced("child_place"))
    call = tab.replies.last.locator(".call")
    assert "Calls child_place reads only" in " ".join(call.inner_text().split())
    assert not runs(tab)

    second = tab.act(call.get_by_role("button", name="Run once"))
    assert tab.replies.count() == 2
    result = page.locator(".message.tool details.file")
    assert result.get_attribute("open") is None
    assert "Result of child_place" in result.inner_text()
    result.locator("summary").click()
    assert str(Path.cwd()) in result.locator("pre").inner_text()
    # All of the prompt and the reply before, but for its last token, which no reply evaluates.
    assert second["cache_n"] >= first["cache_n"] + first["prompt_n"] + first["predicted_n"] - 1
    assert tab.replies.last.get_by_role("button", name="Run once").is_visible()
    assert runs(tab) == ["child_place"]


def until_called(tab: Tab, n_calls: int) -> None:
    """Wait for the results of ``n_calls`` calls."""
    tab.until(lambda: tab.page.locator(".message.tool").count() >= n_calls)


def test_what_is_allowed_in_a_chat_runs_there_until_it_is_stopped(tab: Tab) -> None:
    """A permission for one chat runs its calls until Escape stops them; a reload starts no call,
    and another chat asks the user again.
    """
    tab.say("Where are we?", forced("child_place"))
    tab.replies.last.get_by_role(
        "button", name="Allow in this chat"
    ).click()  # runs again and again
    until_called(tab, 3)
    tab.page.keyboard.press("Escape")
    tab.until_idle()
    n_calls = len(runs(tab))
    assert not tab.page.locator(".message .error").count()
    tab.reload()
    assert tab.page.locator(".message.tool").count() in (
        n_calls - 1,
        n_calls,
    )  # the last one may have been stopped
    assert len(runs(tab)) == n_calls

    tab.page.get_by_role("button", name="New chat").click()
    tab.say("And here?", forced("child_place"))
    assert tab.replies.last.get_by_role("button", name="Run once").is_visible()
    assert len(runs(tab)) == n_calls


def test_what_is_always_allowed_runs_after_a_reload_and_in_other_chats(tab: Tab) -> None:
    tab.say("Where are we?", forced("child_place"))
    tab.configure(json=json.dumps(short()))
    tab.act(tab.replies.last.get_by_role("button", name="Always allow"))
    assert runs(tab) == ["child_place"]
    assert tab.replies.count() == 2
    tab.reload()
    tab.page.get_by_role("button", name="New chat").click()
    tab.begin("And here?", forced("child_place"))
    until_called(tab, 2)
    tab.page.keyboard.press("Escape")
    tab.until_idle()
    assert set(runs(tab)) == {"child_place"}
    tab.say("Write.", forced("child_note") | {"max_tokens": 64})
    assert "child_note" not in runs(tab), "it was not allowed"
    tab.page.locator("#tools").click()
    assert tab.page.locator('#dialog [name="child_place"]').input_value() == "always"


def test_nothing_comes_between_a_reply_and_its_calls(tab: Tab) -> None:
    """The page's request to the cache after each reply comes between no reply and its calls: Escape
    would find nothing to stop, and Enter would send.
    """
    tab.page.evaluate("localStorage.setItem('tools', JSON.stringify({ child_place: 'always' }))")
    tab.reload()
    tab.page.route("**/cache?*", lambda route: None)  # never answered
    tab.page.evaluate(
        """() => {
          window.idle = 0;
          const send = document.querySelector("#send"), note = () => (idle += !send.matches(".stop"));
          new MutationObserver(note).observe(send, { attributes: true, childList: true });
        }"""
    )
    tab.begin("Where are we?", forced("child_place"))
    until_called(tab, 3)
    assert tab.page.evaluate("idle") == 0
    tab.page.keyboard.press("Escape")
    tab.until_idle()
    assert tab.page.evaluate("idle") == 1


def test_a_refused_call_does_not_run_and_what_is_off_is_not_offered(tab: Tab) -> None:
    """The model is told of a refusal in place of a result; a tool that is switched off is no longer
    shown.
    """
    page = tab.page
    tab.say("Where are we?", forced("child_place"))
    tab.configure(json=json.dumps(short()))
    with page.expect_request("**/v1/chat/completions") as asked:
        tab.replies.last.get_by_role("button", name="Refuse").click()
    body = json.loads(asked.value.post_data or "")
    assert body["messages"][-1]["content"] == "The user refused this call."
    assert page.locator(".message.tool .body").inner_text() == "You refused child_place."
    assert [tool["function"]["name"] for tool in body["tools"]] == ["child_place", "child_note"]
    tab.until_idle()
    assert not runs(tab)

    page.locator("#tools").click()
    page.locator('#dialog [name="child_note"]').select_option("off")
    page.get_by_role("button", name="Done").click()
    tab.until_closed()
    assert page.locator("#tools").inner_text() == "Tools 1"
    tab.reload()
    assert page.locator("#tools").inner_text() == "Tools 1"


def calling(tab: Tab, name: str, arguments: str, finish: str = "tool_calls") -> None:
    """Say something that is answered by one call."""
    call = {"index": 0, "id": "a", "function": {"name": name, "arguments": arguments}}
    chunks = [
        {"choices": [{"delta": {"tool_calls": [call]}}]},
        {"choices": [{"delta": {}, "finish_reason": finish}]},
    ]
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    path = "**/v1/chat/completions"
    tab.page.route(path, lambda route: route.fulfill(body=text, content_type="text/event-stream"))
    tab.begin("Do it.")
    tab.until_idle()
    tab.page.unroute(path)


def test_call_shows_arguments_and_truncated_one_cannot_run(tab: Tab) -> None:
    run = tab.page.get_by_role("button", name="Run once")
    calling(
        tab,
        "child_note",
        json.dumps({"path": "a <b>.md", "content": "one\ntwo", "n": [1], "__proto__": {}}),
    )
    call = tab.replies.last.locator(".call")
    assert "can change things" in call.inner_text()
    assert call.locator("dt").all_inner_texts() == ["path", "content", "n", "__proto__"]
    assert call.locator("dd").all_inner_texts() == ["a <b>.md", "one\ntwo", "[\n 1\n]", "{}"]
    assert run.is_visible()
    calling(tab, "child_note", '{"path": "a', "length")
    assert tab.replies.last.locator(".call pre").text_content() == '{"path": "a'
    assert not run.count()


def test_a_tool_that_runs_says_so_and_is_stopped_by_escape(tab: Tab) -> None:
    calling(tab, "child_place", "{}")
    tab.page.route("**/tools", lambda route: None)  # never answered
    tab.replies.last.get_by_role("button", name="Run once").click()
    running = tab.replies.last.get_by_text("running, Esc stops")
    running.wait_for()
    tab.page.keyboard.press("Escape")
    tab.replies.last.get_by_role("button", name="Run once").wait_for()
    assert not running.count()
    assert tab.announced() == "Tool stopped"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_calls_can_be_read_by_everybody(
    open_tab: OpenTab, with_tools: ServerProcess, scheme: str
) -> None:
    """Calls and their dialog pass axe-core's checks on a wide screen and a phone."""
    tab = open_tab(with_tools.url, {"color_scheme": scheme})
    load_axe(tab)
    tab.say("Where are we?", forced("child_place"))
    tab.configure(json=json.dumps(short()))
    tab.act(tab.replies.last.get_by_role("button", name="Run once"))
    tab.page.locator(".message.tool summary").click()
    calling(tab, "child_note", json.dumps({"path": "a.md", "content": "one\ntwo"}))
    found = []
    for place, width in (("wide", 1400), ("phone", 390)):
        tab.page.set_viewport_size({"width": width, "height": 844})
        tab.settle()
        found += findings(tab, place)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        tab.page.locator("#tools").click()
        tab.page.locator('#dialog [name="child_note"]').wait_for()
        found += findings(tab, f"dialog, {place}")
        fits = "e => e.getBoundingClientRect().right <= innerWidth"
        assert tab.page.locator('#dialog [name="child_note"]').evaluate(fits)
        tab.page.keyboard.press("Escape")
        tab.until_closed()
    assert not found, "\n".join(found)
