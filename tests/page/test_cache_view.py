"""The cache view of the page shows the server's cache, and its buttons change it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyctl.measure.server_process import ServerProcess
from tests.page.browser import Tab, saying
from tests.page.conftest import SERVE, OpenTab
from tests.page.test_talk import manual
from tests.process.conftest import disk_cache

if TYPE_CHECKING:  # it may be missing
    from playwright.sync_api import Route


def nodes(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return all prefixes of GET /cache by their ids."""
    found: dict[str, dict[str, Any]] = {}

    def walk(node: dict[str, Any]) -> None:
        found[node["id"]] = node
        for child in node["children"]:
            walk(child)

    for root in body["prefixes"]:
        walk(root)
    return found


def ending(node: dict[str, Any]) -> str:
    """Return the words at the end of a prefix, as the page shows them."""
    tail = re.sub(
        r"^(system|user|assistant)\n", "", str(node["tail"])
    )  # a name of a role, whose mark was cut off
    return tail.split("\n")[0].split("<|")[0].strip()[-12:]


def shown(tab: Tab) -> dict[str, list[str]]:
    """Return the ids of the prefixes that the page shows, and where each of them lies."""
    rows: list[tuple[str, str]] = tab.page.evaluate(
        "[...document.querySelectorAll('#cache .node')].map((n) => [n.dataset.key, n.innerText])"
    )
    return {
        key: [tier for tier, word in (("ram", "RAM"), ("disk", "disk")) if word in text]
        for key, text in rows
    }


KEEP_LIT = """() => {
  window.lit = { added: [], used: [] };
  const note = () => {
    for (const kind in lit) {
      const now = [...document.querySelectorAll("#cache .node." + kind)].map((node) => node.dataset.key);
      if (now.length) lit[kind] = now;
    }
  };
  new MutationObserver(note).observe(document.querySelector("#cache"),
    { attributes: true, childList: true, subtree: true });
}"""
"""Keeps in the page which prefixes were lit last: that fades, and who asks from outside may come
too late.
"""


def until_settled(tab: Tab) -> dict[str, dict[str, Any]]:
    """Wait until evaluation has ended and the page shows the same as the server: its GET /cache."""
    body: dict[str, Any] = {}

    def same() -> bool:
        body.clear()
        body.update(tab.server("cache"))
        tiers = {
            key: [tier for tier in ("ram", "disk") if tier in node["tiers"]]
            for key, node in nodes(body).items()
        }
        stored = {entry["id"]: ["disk"] for entry in body["stored"]}
        return not any(seq["busy"] for seq in body["sequences"]) and shown(tab) == {
            **stored,
            **tiers,
        }

    tab.until(same)
    return nodes(body)


@pytest.fixture(scope="module")
def own_server(
    browser: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Yield a server for the tests of this file, with a disk cache."""
    with serving(tmp_path_factory.mktemp("cache-view")) as server:
        yield server


@pytest.fixture
def empty_server(browser: object, tmp_path: Path) -> Iterator[ServerProcess]:
    """Yield a separate server for a test that drops the cache."""
    with serving(tmp_path) as server:
        yield server


def serving(directory: Path) -> ServerProcess:
    """It makes nothing ready: that comes a second after a reply or later, when a test has looked at
    the tree already, and brings back what was dropped.
    """
    disk = (*disk_cache(directory / "disk"), "--kv-cache-min-tokens", "0")
    return ServerProcess((*SERVE, *disk, "--no-warm-next"), directory / "log")


@pytest.fixture
def tab(open_tab: OpenTab, own_server: ServerProcess) -> Tab:
    """Return the page of that server."""
    return open_tab(own_server.url)


def test_the_tree_is_that_of_the_server(tab: Tab) -> None:
    """Each prefix of GET /cache has a row with its size and text; the rows that a reply used, saved
    or lies on are marked: the view must not show a cache that the server does not have.
    """
    tab.page.evaluate(KEEP_LIT)
    tab.configure(system=manual("trees", 40))
    tab.page.get_by_role("button", name="New chat").click()
    first = tab.say(
        "My name is Ada and the code of the north door is 4711, which no one else knows."
    )
    tab.until(lambda: tab.page.evaluate("lit.added"))
    assert set(first["cache"]["saved"]) >= set(tab.page.evaluate("lit.added"))
    tab.say("What is my name?")
    second = tab.page.locator(".message.user").nth(1)
    second.hover()
    second.get_by_role("button", name="Edit message").click()
    second.get_by_role("textbox", name="Message").fill("What is the code of the north door?")
    edited = tab.act(second.get_by_role("button", name="Send in a new branch"))
    # Until then the reply before is still lit.
    tab.until(lambda: tab.page.evaluate("lit.used") == [edited["cache"]["restored"]])

    found = until_settled(tab)
    assert len(found) >= 2
    for key, node in found.items():
        row = tab.page.locator(f'#cache .node[data-key="{key}"]')
        text = " ".join(row.inner_text().split())
        assert f"{node['n']:,} tokens" in text
        assert ending(node) in text
    path = set(
        tab.page.locator("#cache .node.path").evaluate_all("l => l.map((n) => n.dataset.key)")
    )
    assert edited["cache"]["restored"] in path
    assert set(edited["cache"]["saved"]) & set(found) <= path
    headline = tab.page.locator("#cache .headline")
    tab.until(lambda: re.search(r"tokens restored in \d+ requests?", headline.inner_text()))
    names = set(tab.page.locator("#cache .node.path .name").all_inner_texts())
    assert names == {
        "My name is Ada and the code of the north door is 4711, which no one else knows."
    }
    told = tab.page.locator("#cache").inner_text()
    assert "Disk" in told


def test_a_reply_lights_up_though_its_prefixes_are_drawn_already(tab: Tab) -> None:
    """The view may hear of them before the end of the reply; then nothing has changed since."""
    tab.say(manual("lights", 12), saying("Yes."))
    key = next(iter(until_settled(tab)))
    tab.until(lambda: not tab.page.locator("#cache .node.added").count())  # it fades
    light = """async (id) => {
      await (await import("./page/cache.js")).replied({ restored: "", saved: [id] });
      return [...document.querySelectorAll("#cache .node.added")].map((node) => node.dataset.key);
    }"""
    assert tab.page.evaluate(light, key) == [key]


REVISIONS = itertools.count(1001)


def counting(tab: Tab, saved: object) -> None:
    """Answer GET /cache with this field `saved`, or without it; each answer has a new revision."""

    def answer(route: Route) -> None:
        response = route.fetch(url=tab.url + "cache")
        body = response.json()
        body.pop("saved", None)
        body["revision"] += next(REVISIONS)
        route.fulfill(response=response, json=body if saved is None else {**body, "saved": saved})

    tab.page.route(re.compile(r"/cache(\?|$)"), answer)


def test_the_headline_is_the_time_saved_for_all_clients(tab: Tab) -> None:
    """The headline shows the time saved today and in all from the server's sums, one only where
    both are equal, and the waiting where an older server sends none.
    """
    headline = tab.page.locator("#cache .headline")
    nothing = {"seconds": 0.0, "tokens": 0, "requests": 0}
    today = {"seconds": 83.4, "tokens": 120_400, "requests": 84}
    total = {"seconds": 19_000.0, "tokens": 9_000_000, "requests": 812}
    tab.say(manual("savings", 12), saying("Yes."))
    counting(tab, {"today": nothing, "total": total})
    tab.until(lambda: headline.locator("strong").all_inner_texts() == ["0 s"])
    counting(tab, {"today": today, "total": total})
    tab.until(lambda: headline.locator("strong").all_inner_texts() == ["1 min 23 s"])
    words = " ".join(headline.inner_text().split())
    assert "of waiting saved today, 5 h 16 min in total, for all clients" in words
    assert "120k tokens restored in 84 requests" in words
    counting(tab, {"today": today, "total": today})
    tab.until(lambda: "saved today, for all clients" in headline.inner_text())
    counting(tab, None)
    tab.until(lambda: "waited for prompts today" in headline.inner_text())
    n_requests = tab.server("cache")["totals"]["requests"]
    requests = "1 request" if n_requests == 1 else f"{n_requests:,} requests"
    tab.until(lambda: f"tokens restored in {requests}" in headline.inner_text())


def test_a_request_is_stopped_where_it_runs(tab: Tab) -> None:
    """The row of a running request has a button that ends it on the server, after a question, and
    the chat shows who stopped it.
    """
    tab.configure(system=manual("stops", 40))
    tab.page.get_by_role("button", name="New chat").click()
    tab.say("Hello", saying("Yes."))
    until_settled(tab)
    tab.begin(
        "On and on.",
        {"grammar": 'root ::= ("on and on and on and on and " ){1500}', "max_tokens": -1},
    )
    row = tab.page.locator("#cache .node", has_text="in use").first
    row.wait_for()
    press = """row => {
      row.focus();
      const stop = [...row.querySelectorAll("button")].find((button) => button.textContent === "Stop");
      const isSeen = stop.checkVisibility();
      stop.click();
      return isSeen;
    }"""
    assert row.evaluate(press), "on the row that has the focus"
    tab.page.locator("#dialog").get_by_role("button", name="Stop").click()
    tab.until(lambda: "stopped from the cache view" in tab.replies.last.inner_text())
    tab.until(lambda: not any(slot["is_processing"] for slot in tab.server("slots")))
    tab.until(lambda: "in use" not in tab.page.locator("#cache .tree").inner_text())


def test_the_time_without_a_cache_is_at_the_speed_of_the_last_prompt(tab: Tab) -> None:
    costs = [(1, 100, 1000, 0), (2, 10, 90, 1000), (3, 50, 100, 500)]
    messages = [
        {"created": at, "stats": {"prompt_n": n, "prompt_ms": ms, "cache_n": cached}}
        for at, n, ms, cached in costs
    ]
    waits = (
        "async ([all, from]) => (await import('./page/store.js')).waits([{ messages: all }], from)"
    )
    found = [tab.page.evaluate(waits, [dict(enumerate(messages)), start]) for start in (0, 2, 9)]
    assert found == [
        {"waited": 1190, "instead": 1190 + 10 * 1000 + 2 * 500},
        {"waited": 190, "instead": 190 + 2 * 1000 + 2 * 500},
        {"waited": 0, "instead": 0},
    ]


def checking(tab: Tab, verified: dict[str, int], differing: dict[str, int]) -> None:
    """Answer GET /cache with these results of checks; each answer has a new revision."""

    def answer(route: Route) -> None:
        response = route.fetch(url=tab.url + "cache")
        body = response.json()
        body["revision"] += next(REVISIONS)
        body["canary"] |= {"verified": verified, "differing": differing}
        route.fulfill(response=response, json=body)

    tab.page.route(re.compile(r"/cache(\?|$)"), answer)


def test_checks_of_snapshots_are_shown(tab: Tab) -> None:
    line = tab.page.locator("#cache .checks")
    assert not line.count(), "no check has run"
    checking(tab, {"ram": 2, "disk": 10}, {})
    tab.until(lambda: line.count() == 1 and line.inner_text() == "12 snapshots verified to the bit")
    checking(tab, {"ram": 1}, {"disk": 1})
    wrong = "1 snapshot verified to the bit, 1 differed and left the cache"
    tab.until(lambda: line.count() == 1 and line.inner_text() == wrong)


def test_a_prefix_that_adds_a_line_end_is_shown_by_the_words_before_it(tab: Tab) -> None:
    def blank(route: Route) -> None:
        answer = route.fetch()
        body = answer.json()
        for node in nodes(body).values() if "prefixes" in body else ():
            node["head"] = "\n"
        route.fulfill(response=answer, json=body)

    tab.page.route("**/cache*", blank)
    tab.say(manual("lines", 12), saying("Yes."))
    found = until_settled(tab)
    assert found
    for key, node in found.items():
        words = tab.page.locator(f'#cache .node[data-key="{key}"] .words').inner_text()
        assert "(words are shown" not in words
        assert ending(node) in words


def test_pin_survives_and_drop_removes(empty_server: ServerProcess, open_tab: OpenTab) -> None:
    """A pin survives a reload and hides the button to drop; a dropped prefix is gone from the view,
    RAM and disk.
    """
    tab = open_tab(empty_server.url)
    tab.page.get_by_text("The cache is empty.").wait_for()
    assert not tab.page.locator("#cache .headline").count(), "no sums of nothing"
    tab.say(manual("pins", 12))
    found = until_settled(tab)
    key, node = max(found.items(), key=lambda each: each[1]["n"])
    row = tab.page.locator(f'#cache .node[data-key="{key}"]')
    row.focus()
    row.get_by_role("button", name="Pin", exact=True).click()
    tab.until(lambda: "pinned" in (row.get_attribute("class") or ""))
    assert nodes(tab.server("cache"))[key]["pinned"]
    assert not row.get_by_role("button", name="Drop").count()
    tab.reload()
    until_settled(tab)
    assert "pinned" in (row.get_attribute("class") or "")
    row.focus()
    row.get_by_role("button", name="Unpin").click()
    tab.until(lambda: "pinned" not in (row.get_attribute("class") or ""))
    row.focus()
    row.get_by_role("button", name="Drop").click()
    tab.until(lambda: key not in shown(tab))
    body = tab.server("cache")
    assert key not in nodes(body)
    assert key not in {entry["id"] for entry in body["stored"]}
    tab.reload()
    until_settled(tab)
    assert key not in shown(tab)
    assert node["n"] > 100


def test_drop_all_asks_and_warm_makes_ready(empty_server: ServerProcess, open_tab: OpenTab) -> None:
    """Dropping everything asks first; prewarming then evaluates the open conversation once, and its
    next reply evaluates next to nothing.
    """
    tab = open_tab(empty_server.url)
    tab.say(manual("warmth", 12))
    until_settled(tab)
    tab.page.get_by_role("button", name="Drop all").click()
    tab.page.locator("#dialog").get_by_role("button", name="Cancel").click()
    assert nodes(tab.server("cache"))

    def drop_all_and_warm() -> dict[str, int]:
        tab.page.get_by_role("button", name="Drop all").click()
        tab.page.locator("#dialog").get_by_role("button", name="Drop").click()
        tab.until(lambda: not nodes(tab.server("cache")))
        with tab.page.expect_response("**/cache/warm") as answer:
            tab.page.get_by_role("button", name="Prewarm", exact=True).click()
        warmed: dict[str, int] = answer.value.json()
        tab.until(lambda: f"{warmed['ready']:,} tokens are cached" in tab.noticed())
        return warmed

    warmed = drop_all_and_warm()
    ready = warmed["ready"]
    assert warmed["evaluated"] > 32, "the reply, as the next prompt has it"
    assert max(node["n"] for node in until_settled(tab).values()) == ready > 100
    assert drop_all_and_warm() == {"ready": ready, "cached": ready, "evaluated": 0}
    assert not until_settled(tab), "what is live needs no snapshot"
    assert ready in [seq["n"] for seq in tab.server("cache")["sequences"]]
    timings = tab.act(tab.replies.last.get_by_role("button", name="Regenerate reply"))
    assert timings["prompt_n"] < 40


def test_the_tree_is_walked_with_the_keyboard(tab: Tab) -> None:
    tab.say(manual("keys", 12), saying("Yes."))
    until_settled(tab)
    rows = tab.page.locator("#cache .node")
    assert rows.count() > 1
    rows.first.focus()
    tab.page.keyboard.press("ArrowDown")
    focused = "document.activeElement.dataset.key"
    assert tab.page.evaluate(focused) == rows.nth(1).get_attribute("data-key")
    tab.page.keyboard.press("End")
    assert tab.page.evaluate(focused) == rows.last.get_attribute("data-key")
    tab.page.keyboard.press("Enter")
    assert "open" in (rows.last.get_attribute("class") or "")
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.tagName") == "BUTTON"
    for row in rows.all():
        assert "tokens" in row.inner_text()


def test_a_button_that_is_used_stays_while_its_row_is_drawn_anew(tab: Tab) -> None:
    """A button keeps the focus while news redraw its row, else a keyboard user would lose the place
    every second.
    """
    tab.say(manual("buttons", 12), saying("Yes."))
    until_settled(tab)
    row = tab.page.locator("#cache .node").last
    row.focus()
    row.get_by_role("button").first.focus()
    focused = "document.activeElement.textContent"
    label = tab.page.evaluate(focused)
    news = itertools.count(1001)

    def change(route: Route) -> None:
        answer = route.fetch(url=tab.url + "cache")
        body = answer.json()
        n = next(news)
        body["revision"] += n
        for node in nodes(body).values():
            node["hits"] = n
        route.fulfill(response=answer, json=body)

    tab.page.route("**/cache?since=*", change)
    tab.until(lambda: max(map(int, re.findall(r"(\d+) hits", row.inner_text())), default=0) > 1002)
    assert tab.page.evaluate(focused) == label
    assert label in ("Pin", "Drop")


def test_what_does_not_change_costs_next_to_nothing(tab: Tab) -> None:
    tab.say("Hello", saying("Yes."))
    until_settled(tab)

    def costs_nothing() -> bool:
        with tab.page.expect_response("**/cache?since=*") as asked:
            pass
        return len(asked.value.body()) < 60

    tab.until(costs_nothing)  # what was to be written or made ready may come before
    tab.page.get_by_role("button", name="Cache", exact=True).click()  # folded: the view is hidden
    tab.settle()  # what was asked for before is known by then
    tab.requests.clear()
    tab.page.wait_for_timeout(2500)
    assert not [request.url for request in tab.requests]


def test_the_timeline_has_a_row_per_request_with_the_reason(tab: Tab) -> None:
    """An edited message makes a rewrite; its row has the counts of GET /cache and the reason."""
    tab.page.get_by_role("button", name="New chat").click()
    tab.say(manual("times", 30), saying("Yes."))
    tab.say(manual("places", 30), saying("Yes."))
    second = tab.page.locator(".message.user").nth(1)
    second.hover()
    second.get_by_role("button", name="Edit message").click()
    second.get_by_role("textbox", name="Message").fill(manual("people", 30))
    edited = tab.act(second.get_by_role("button", name="Send in a new branch"))
    until_settled(tab)
    row = tab.page.locator("#cache .timeline .request").first
    tab.until(lambda: "rewrite" in row.inner_text())
    label = row.get_by_role("img").get_attribute("aria-label") or ""
    assert f"{edited['prompt_n']:,} evaluated" in label
    served = tab.server("cache")["replies"][-1]
    assert served["kind"] == "rewrite"
    assert served["why"]["difference"] in row.inner_text()
    kinds = tab.page.locator("#cache .timeline .kind").all_inner_texts()
    assert "append" in kinds
