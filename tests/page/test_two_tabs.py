"""A reply in two tabs of one browser: both show it, either stops it, and one of them ends it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.page.browser import Tab, saying

PLAY = """() => {
  const real = window.fetch, encoder = new TextEncoder();
  let stream;
  window.isAsked = false;
  window.fetch = async (path, options) => {
    const isKept = path.includes("v1/stream?");
    if (path.endsWith("v1/streams/lookup")) {
      const ids = JSON.parse(options.body).conversation_ids;
      return Response.json(ids.map((id) => ({ conversation_id: id, is_done: false, total_bytes: 1 })));
    }
    if (isKept && options.method === "DELETE") return new Response(null, { status: 204 });
    if (!isKept && !path.endsWith("v1/chat/completions")) return real(path, options);
    const body = new ReadableStream({ start: (given) => (stream = given) });
    const { signal } = options;
    signal.addEventListener("abort", () => stream.error(signal.reason));
    window.isAsked = true;
    return new Response(body);
  };
  window.push = (data) => {
    stream.enqueue(encoder.encode(`data: ${data}\\n\\n`));
    if (data === "[DONE]") stream.close();
  };
  window.lose = () => stream.error(new TypeError("network error"));
}"""
"""A server that keeps every stream, and sends in it what the test pushes."""

PROGRESS = {"prompt_progress": {"total": 1224, "cache": 512, "processed": 512, "left_ms": 14_600}}
END = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


def content(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


def push(event: object, *tabs: Tab) -> None:
    """Send the event of a stream to each of the tabs."""
    for tab in tabs:
        tab.page.evaluate(
            "data => push(data)", event if isinstance(event, str) else json.dumps(event)
        )


def open_first(tab: Tab) -> None:
    tab.page.locator("#list .name", has_text="Two tabs?").click()


@pytest.fixture
def other(tab: Tab) -> Tab:
    """Return a second tab, which shows the conversation in which the first one has just asked."""
    other = tab.beside()
    for each in (tab, other):
        each.page.evaluate(PLAY)
    tab.begin("Two tabs?")
    open_first(other)
    for each in (tab, other):
        each.until(lambda each=each: each.page.evaluate("isAsked"))
    return other


def is_stopped(tab: Tab) -> bool:
    return tab.replies.last.get_by_text("Stopped.").is_visible()


def test_a_second_tab_shows_the_prompt_and_stops_it(tab: Tab, other: Tab) -> None:
    push({"prompt_progress": {"total": 1224, "cache": 0, "processed": 0, "waiting": 2}}, tab, other)
    for each in (tab, other):
        words = each.replies.last.locator(".stats")
        each.until(lambda words=words: "place 2 in the queue: 1,224 tokens" in words.inner_text())
    push(PROGRESS, tab, other)
    for each in (tab, other):
        words = each.replies.last.locator(".stats")
        each.until(lambda words=words: "712 to evaluate, about 14.6 s left" in words.inner_text())
        assert each.replies.last.get_by_role("progressbar").is_visible()
        assert not each.page.get_by_role("button", name="Try again").count()
    other.page.get_by_role("button", name="Stop").click()
    for each in (tab, other):
        each.until(lambda each=each: is_stopped(each))
        each.until_idle()
        assert each.page.get_by_role("button", name="Try again").is_visible()
        assert not each.page.locator(".message .error").count()


def test_a_stream_that_another_tab_ended_was_stopped(tab: Tab, other: Tab) -> None:
    """Its connection may end before that tab is heard."""
    push(content("One"), tab, other)
    tab.page.evaluate("new BroadcastChannel('pyctl').constructor.prototype.postMessage = () => {}")
    tab.page.get_by_role("button", name="Stop").click()
    tab.until(lambda: is_stopped(tab))
    other.page.evaluate("lose()")
    other.until(lambda: is_stopped(other))
    assert other.texts()[-1] == "One"
    assert not other.page.locator(".message .error").count()


@pytest.mark.parametrize("reads_on", [True, False])
def test_both_tabs_follow_the_text_to_its_end(tab: Tab, other: Tab, reads_on: bool) -> None:
    """Either may be the first to end it; one that has not read all takes the rest over."""
    push(content("One, "), tab, other)
    for each in (tab, other):
        each.until(lambda each=each: each.texts()[-1] == "One,")
        assert each.page.get_by_role("button", name="Stop").is_visible()
    for event in (content("two."), END, "[DONE]"):
        push(event, *([other] if reads_on else []), tab)
    for each in (tab, other):
        each.until_idle()
        each.until(lambda each=each: each.texts()[-1] == "One, two.")
    if not reads_on:
        assert tab.announced() == "Reply complete"
    for each in (tab, other):
        each.reload()
        assert each.texts() == ["Two tabs?", "One, two."]


def test_a_reply_is_kept_by_the_tab_that_is_left(tab: Tab, other: Tab) -> None:
    push(content("One, "), tab, other)
    tab.page.close()
    push(content("two."), other)
    for event in (END, "[DONE]"):
        push(event, other)
    other.until_idle()
    other.reload()
    assert other.texts() == ["Two tabs?", "One, two."]


def test_a_conversation_that_another_tab_deletes_is_gone(tab: Tab, other: Tab) -> None:
    push(content("One, "), tab, other)
    item = other.page.locator("#list li").first
    item.hover()
    item.get_by_role("button", name="Delete").click()
    other.page.locator("#dialog").get_by_role("button", name="Delete").click()
    for each in (tab, other):
        each.until(lambda each=each: not each.messages.count())
        each.reload()
        assert not each.messages.count()


@pytest.mark.parametrize("stops", ["first", "second"])
def test_either_tab_stops_the_server(tab: Tab, stops: str) -> None:
    other = tab.beside()
    tab.begin(
        "Two tabs?", {"grammar": 'root ::= ("on and on and on and " ){1500}', "max_tokens": -1}
    )
    open_first(other)
    for each in (tab, other):
        each.until(lambda each=each: "on and on" in each.texts()[-1])
    (tab if stops == "first" else other).page.get_by_role("button", name="Stop").click()
    for each in (tab, other):
        each.until_idle()
        each.until(lambda each=each: is_stopped(each))
    tab.until(lambda: not any(slot["is_processing"] for slot in tab.server("slots")))
    tab.configure(json=json.dumps(saying("Yes.")))
    tab.act(tab.replies.last.get_by_role("button", name="Regenerate reply"))
    other.until(lambda: other.texts()[-1] == "Yes.")
