"""Text of a model or a file is never executed and never sent elsewhere; the page asks for the key
once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pyctl.measure.server_process import ServerProcess
from tests.page.browser import Tab, saying
from tests.page.conftest import SERVE, OpenTab
from tests.unit.page.hostile import HOSTILE

REPLIES = ("\n\n".join(HOSTILE[: len(HOSTILE) // 2]), "\n\n".join(HOSTILE[len(HOSTILE) // 2 :]))
"""Every attack that the renderer is tested with, in replies of the model."""

STOPPED = {
    *("script-src-attr", "script-src-elem", "style-src-attr", "style-src-elem"),
    *("img-src", "frame-src", "form-action", "base-uri"),
}
"""Directives of the policy that have to stop the attempts below."""

RAN = "() => { window.alert = () => { document.body.dataset.ran = '1'; }; }"


@pytest.mark.parametrize("reply", REPLIES)
def test_a_hostile_reply_runs_nothing_and_asks_for_nothing(tab: Tab, reply: str) -> None:
    """A reply's text never runs a script, changes the page or sends a request; its links carry no
    referrer and no script.
    """
    tab.page.evaluate(RAN)
    tab.say("Attack me.", saying(reply))
    tab.until(lambda: tab.replies.last.locator("p").count() > 3)
    title = tab.page.title()
    address = tab.page.url
    for link in tab.replies.last.locator("a").all():
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        assert (
            not (link.get_attribute("href") or "")
            .lower()
            .strip()
            .startswith(("javascript", "data", "vbscript"))
        )
        link.hover()
    assert not tab.replies.last.locator(
        "script, style, iframe, base, svg, [onload], [onerror], [onclick]"
    ).count()
    tab.reload()
    tab.page.evaluate(RAN)
    assert tab.page.evaluate("document.body.dataset.ran") is None
    assert tab.page.title() == title
    assert tab.page.url == address
    tab.check()  # requests to anywhere else are problems, and so is what the policy had to stop


def test_the_policy_stops_what_the_renderer_would_let_through(tab: Tab) -> None:
    """The policy stops a script that the renderer let through: the second wall stands by itself."""
    tab.expected += [
        "policy: ",
        "Content Security Policy",
        "violates the following",
        "Refused to",
        "status of 404",
    ]
    tab.page.evaluate(RAN)
    evil = (
        "<img src=x onerror=alert(1)><img src=http://tracker.example/a.png><iframe "
        "src=http://tracker.example></iframe>"
        "<style>@import 'http://tracker.example/b.css'</style><p "
        "style='background:url(http://tracker.example/c)'>x</p>"
        "<form action=http://tracker.example/d><button id=evil>go</button></form><base "
        "href=http://tracker.example/>"
    )
    tab.page.evaluate("(evil) => { document.querySelector('#messages').innerHTML = evil; }", evil)
    tab.page.evaluate(
        "const s = document.createElement('script'); s.textContent = 'alert(2)'; "
        "document.body.append(s);"
    )
    tab.page.locator("#evil").click(no_wait_after=True)
    tab.until(lambda: {f"error: policy: {directive}" for directive in STOPPED} <= set(tab.problems))
    tab.settle()
    assert tab.page.evaluate("document.body.dataset.ran") is None
    asked = [request for request in tab.requests if "tracker.example" in request.url]
    assert len(asked) <= 4  # named in the page's console, and refused before anything was sent
    for request in asked:
        tab.until(lambda request=request: request.failure or tab.settle())
        tab.problems.remove(f"request to {request.url}")
    assert tab.page.url == tab.url


def test_a_page_of_another_origin_learns_nothing(tab: Tab) -> None:
    """A page of another origin can neither read the cache, which shows texts of prompts, nor change
    it.
    """
    tab.expected += ["CORS", "Failed to load resource", "status of 40[03]", "elsewhere.example"]
    tab.page.route(
        "http://elsewhere.example/",
        lambda route: route.fulfill(body="<p>x", content_type="text/html"),
    )
    tab.page.goto("http://elsewhere.example/")
    found = tab.page.evaluate(
        """async (url) => {
          const answers = [];
          for (const [path, options] of [["cache", {}], ["slots", {}], ["cache", { method: "DELETE" }],
              ["cache/pin", { method: "POST", body: "{}" }]])
            answers.push(await fetch(url + path, options).then((answer) => answer.status, () => "refused"));
          return answers;
        }""",
        tab.url,
    )
    assert set(found) <= {"refused", 403}, found


def test_the_key_is_asked_for_once_and_kept(
    open_tab: OpenTab, browser: object, tmp_path: Path
) -> None:
    """A wrong key is asked for again, the right one is kept and sent with every later request, and
    never in an address; without it the stored conversation stays readable.
    """
    with ServerProcess((*SERVE, "--api-key", "sesame"), tmp_path / "log") as server:
        tab = open_tab(server.url, ready=False)
        tab.expected.append("status of 401")
        tab.page.goto(tab.url)
        dialog = tab.page.locator("#dialog")
        field = dialog.get_by_label("API key", exact=True)
        field.fill("wrong")
        tab.page.keyboard.press("Enter")
        tab.until(lambda: field.is_visible() and field.input_value() == "")
        assert field.get_attribute("type") == "password"
        field.fill("sesame")
        tab.page.keyboard.press("Enter")
        tab.until_ready()
        assert not dialog.is_visible()
        tab.say("Hello", saying("Yes.\n\n1. one"))
        tab.until(lambda: tab.page.locator("#cache .headline").count())
        tab.page.evaluate("localStorage.removeItem('key')")
        tab.page.reload()
        field.wait_for()
        tab.until(lambda: tab.texts()[-1] == "Yes.\n\n1. one")
        field.fill("sesame")
        tab.page.keyboard.press("Enter")
        tab.replies.last.locator("ol li").wait_for()
        refused = len(tab.problems)
        tab.reload()
        tab.say("Hello again", saying("Yes."))
        assert not dialog.is_visible()
        assert len(tab.problems) == refused  # not one request without the key
        tab.close()
        assert all("sesame" not in request.url for request in tab.requests)
