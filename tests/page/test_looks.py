"""Accessibility of the page: contrast, names for screen readers, the keyboard alone, a phone."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from pyctl.measure.server_process import ServerProcess
from tests.page.browser import Tab, saying
from tests.page.conftest import OpenTab
from tests.page.test_talk import manual

RICH = (
    "# Title\n\nSome **bold**, `code` and [a link](https://example.org/).\n\n> quoted\n\n"
    "```python\ndef f(x):  # why\n    return 'x' + str(1)\n```\n\n| a | b |\n|---|---|\n| 1 | "
    "$x^2$ |\n\n"
    "- one\n- two\n- [ ] https://example.org/\n- [x] H<sub>2</sub>O\n"
)


def fill(tab: Tab) -> None:
    """Fill the page with a conversation that has one of everything."""
    tab.configure(thinking="on", system=manual("looks", 12))
    tab.page.get_by_role("button", name="New chat").click()
    tab.say("A first question, with some words.", saying(f"The clock says so.\n</think>\n\n{RICH}"))
    tab.until(lambda: tab.replies.last.locator("pre").count())
    first = tab.page.locator(".message.user").first
    first.hover()
    first.get_by_role("button", name="Edit message").click()
    first.get_by_role("textbox").fill("Another first question, with other words.")
    tab.act(first.get_by_role("button", name="Send in a new branch"))
    tab.until(lambda: tab.replies.last.locator("pre").count())
    tab.until(lambda: tab.page.locator("#cache .node").count() > 1)


@pytest.fixture(params=["light", "dark"])
def full(open_tab: OpenTab, server: ServerProcess, request: pytest.FixtureRequest) -> Tab:
    """Return the page with something in it, by day and by night."""
    tab = open_tab(server.url, {"color_scheme": request.param})
    fill(tab)
    return tab


def test_all_of_it_works_with_the_keyboard_alone(open_tab: OpenTab, server: ServerProcess) -> None:
    """Writing, editing, panels and a walk through every control work without a mouse; each place
    shows its focus, and the walk comes round.
    """
    tab = open_tab(server.url)
    keyboard = tab.page.keyboard
    assert tab.page.evaluate("document.activeElement.id") == "text"
    keyboard.type("With the keyboard")
    keyboard.press("Shift+Enter")
    keyboard.type("alone")
    with tab.page.expect_response("**/v1/chat/completions") as asked:
        keyboard.press("Enter")
    tab.timings(asked.value)
    assert tab.texts()[0] == "With the keyboard\nalone"
    assert tab.page.evaluate("document.activeElement.id") == "text"
    keyboard.press("ArrowUp")
    assert tab.page.evaluate("document.activeElement.value") == "With the keyboard\nalone"
    keyboard.type(", edited")
    with tab.page.expect_response("**/v1/chat/completions") as asked:
        keyboard.press("Control+Enter")
    tab.timings(asked.value)
    assert tab.texts()[0] == "With the keyboard\nalone, edited"
    keyboard.press("Control+j")
    assert not tab.messages.count()
    keyboard.press("Control+.")
    assert not tab.page.locator("#cache").is_visible()
    keyboard.press("Control+.")
    assert tab.page.locator("#cache").is_visible()
    # Where one can go by Tab is seen, and from the last place one comes round to the first: no
    # trap.
    tab.page.evaluate("document.activeElement.blur()")
    places: list[str] = []
    for _ in range(60):
        keyboard.press("Tab")
        place, outline = tab.page.evaluate(
            """() => {
              const e = document.activeElement, style = getComputedStyle(e);
              const around = getComputedStyle(e.closest(".box") ?? e).borderColor;
              const rest = getComputedStyle(document.querySelector("#search")).borderColor;
              const seen = (style.outlineStyle !== "none" && style.outlineWidth !== "0px") || around !== rest;
              return [e.id || e.getAttribute("aria-label") || e.textContent.trim() || e.tagName, seen];
            }"""
        )
        if place == "BODY" or (places and place == places[0]):
            break
        places.append(place)
        assert outline, place
    named = {"new", "search", "import", "export", "settings-open", "text", "attach", "preset"}
    assert {"Skip to the message field", *named} <= set(places)
    assert len(places) < 60


def test_the_dialog_keeps_the_focus_and_gives_it_back(
    open_tab: OpenTab, server: ServerProcess
) -> None:
    tab = open_tab(server.url)
    tab.page.get_by_role("button", name="Settings").focus()
    tab.page.keyboard.press("Enter")
    tab.page.locator("#dialog").wait_for()
    for _ in range(25):
        tab.page.keyboard.press("Tab")
        inside = "!document.activeElement || document.activeElement === document.body"
        assert tab.page.evaluate(f"{inside} || document.activeElement.closest('#dialog') !== null")
    tab.page.keyboard.press("Escape")
    tab.until_closed()
    assert tab.page.evaluate("document.activeElement.id") == "settings-open"


def test_keys_and_the_model_are_explained(open_tab: OpenTab, server: ServerProcess) -> None:
    """ "?" lists the keys only outside of a text field, and the dialog about the model shows the
    values of GET /props.
    """
    tab = open_tab(server.url)
    tab.page.keyboard.press("?")
    dialog = tab.page.locator("#dialog")
    assert "Ctrl J" in dialog.inner_text()
    tab.page.keyboard.press("Escape")
    tab.until_closed()
    tab.page.keyboard.type("Why?")
    assert tab.page.input_value("#text") == "Why?"
    tab.page.get_by_role("button", name="About the model").click()
    tab.until(lambda: "16,384 tokens" in dialog.inner_text())
    said = dict(
        zip(
            dialog.locator("dt").all_inner_texts(),
            dialog.locator("dd").all_inner_texts(),
            strict=True,
        )
    )
    props = tab.server("props")
    assert said["File"] == "builtin.gguf"
    assert said["Quantization"] == props["model_ftype"] == "F16"
    assert said["K and V types"] == props["cache_type_k"] == "f16"
    assert said["Layers on the GPU"] == f"{props['n_gpu_layers']} of {props['n_layers']}"
    assert said["Drafts"] == "draft-mtp"
    assert said["Memory"] == props["model_memory"]
    tab.page.keyboard.press("Escape")
    tab.until_closed()


def test_an_error_of_the_settings_leaves_save_in_sight(
    open_tab: OpenTab, server: ServerProcess
) -> None:
    tab = open_tab(server.url, {"viewport": {"width": 1200, "height": 700}})
    tab.page.keyboard.press("Control+,")
    dialog = tab.page.locator("#dialog")
    assert tab.page.evaluate("document.activeElement.name") == "system"
    assert dialog.evaluate("e => e.scrollHeight <= e.clientHeight"), "one scroll bar"
    save = dialog.get_by_role("button", name="Save")
    for wrong in ("{", "[1]", "7"):
        dialog.locator('[name="json"]').fill(wrong)
        save.click()
        tab.until(lambda: "Not a JSON object" in dialog.get_by_role("alert").inner_text())
    for shown in (save, dialog.get_by_role("alert")):
        assert shown.evaluate(IN_SIGHT)
    hint = dialog.locator('[name="top_p"]').get_attribute("aria-describedby")
    assert "likeliest" in dialog.locator(f"#{hint}").inner_text()


IN_SIGHT = (
    "e => { const b = e.getBoundingClientRect(); return b.bottom <= innerHeight && b.top >= 0; }"
)


def test_tab_goes_through_a_dialog_as_it_is_read(open_tab: OpenTab, server: ServerProcess) -> None:
    """Buttons of a dialog are focused from left to right, as they are read."""
    tab = open_tab(server.url)
    tab.page.locator("#list li").first.hover()
    tab.page.locator("#list").get_by_role("button", name="Conversation options").click()
    tab.page.locator("#dialog footer").wait_for()
    left = "l => l.map((button) => [button.innerText, button.getBoundingClientRect().left])"
    buttons = tab.page.locator("#dialog footer button").evaluate_all(left)
    assert [name for name, _ in buttons] == [
        "Save",
        "Cancel",
        "Export as Markdown",
        "Export as JSON",
    ]
    assert [place for _, place in buttons] == sorted(place for _, place in buttons)
    tab.page.keyboard.press("Escape")
    tab.until_closed()
    tab.page.keyboard.press("Control+,")
    appearance = tab.page.locator('#dialog [name="theme"]')
    appearance.wait_for()
    assert appearance.evaluate(IN_SIGHT), "above the fields of sampling"


PHONE = {
    "viewport": {"width": 360, "height": 740},
    "has_touch": True,
    "is_mobile": True,
    "device_scale_factor": 2,
}


def test_a_phone_is_wide_enough(open_tab: OpenTab, server: ServerProcess) -> None:
    """At 360 pixels nothing is wider than the screen, no control too small for a finger, and both
    side panels open and close, upright and turned.
    """
    tab = open_tab(server.url, PHONE)
    tab.page.fill(
        "#text", "A question from a phone, with averylongwordthatdoesnotendforalongtime" + "x" * 60
    )
    with tab.page.expect_response("**/v1/chat/completions") as asked:
        tab.page.get_by_role("button", name="Send").tap()
    tab.timings(asked.value)
    assert tab.page.locator("#model-name").inner_text() == "builtin.gguf"
    title = tab.page.locator("#title")
    lines = "e => Math.round(e.clientHeight / parseFloat(getComputedStyle(e).lineHeight))"
    assert title.evaluate(lines) == 2
    tab.page.get_by_role("button", name="Conversations").tap()
    tab.page.get_by_role("button", name="Settings").tap()
    tab.page.locator('#dialog [name="json"]').fill(
        json.dumps(saying(RICH + "\n\n```\n" + "wide " * 60 + "\n```\n"))
    )
    tab.page.get_by_role("button", name="Save").tap()
    tab.until_closed()
    tab.page.keyboard.press("Escape")
    tab.act(tab.replies.last.get_by_role("button", name="Regenerate reply"))
    tab.until(lambda: tab.replies.last.locator("pre").count())
    narrow = """() => {
      const page = document.documentElement, width = page.clientWidth, found = [];
      if (page.scrollWidth > width) found.push("the page is " + page.scrollWidth);
      const inside = (e) => e.closest("pre, .table, .code, nav, aside, math");
      for (const e of document.querySelectorAll("main *, dialog[open] *")) {
        const box = e.getBoundingClientRect();
        if (e.checkVisibility() && box.width && (box.right > width + 1 || box.left < -1) && !inside(e))
          found.push(e.tagName + "." + e.className + " to " + Math.round(box.right));
      }
      return found;
    }"""
    assert not tab.page.evaluate(narrow)
    small = """() => [...document.querySelectorAll("main button, main select, main textarea")]
      .filter((e) => e.checkVisibility() && !e.closest("details:not([open])"))
      .map((e) => [e.ariaLabel || e.textContent, e.getBoundingClientRect()])
      .filter(([, box]) => box.width && (box.height < 24 || box.width < 20))
      .map(([name, box]) => `${name}: ${Math.round(box.width)} x ${Math.round(box.height)}`)"""
    assert not tab.page.evaluate(small)
    for name, panel in (("Cache", "#cache"), ("Conversations", "#side")):
        assert not tab.page.locator(panel).is_visible()
        tab.page.get_by_role("button", name=name, exact=True).tap()
        tab.until(lambda panel=panel: tab.page.locator(panel).is_visible())
        box = tab.page.locator(panel).bounding_box()
        assert box is not None
        assert box["width"] <= 360
        if panel == "#cache":
            tab.until(lambda: tab.page.locator("#cache .node").count())
            tab.page.get_by_role("button", name="Close").tap()
        else:
            tab.page.keyboard.press("Escape")
        tab.until(lambda panel=panel: not tab.page.locator(panel).is_visible())
    tab.page.set_viewport_size({"width": 740, "height": 360})
    tab.until(lambda: tab.page.evaluate("innerWidth") == 740)
    tab.settle()
    assert not tab.page.evaluate(narrow)
    assert tab.page.locator("#text").is_visible()


def test_the_look_is_chosen(open_tab: OpenTab, server: ServerProcess) -> None:
    """A chosen look survives a reload; choosing the system's own look again follows the system from
    then on.
    """
    tab = open_tab(server.url, {"color_scheme": "light"})
    ground = "getComputedStyle(document.body).backgroundColor"
    light = tab.page.evaluate(ground)
    tab.configure(theme="dark")
    dark = tab.page.evaluate(ground)
    assert light != dark
    tab.reload()
    assert tab.page.evaluate(ground) == dark
    toggle = tab.page.get_by_role("button", name="Light or dark")
    for wanted, kept in ((light, "system"), (dark, "dark")):  # where the system is light
        toggle.click()
        assert tab.page.evaluate(ground) == wanted
        assert json.loads(tab.page.evaluate("localStorage.theme")) == kept
    tab.configure(theme="system", stats="no")
    assert tab.page.evaluate(ground) == light
    tab.say("Hello", saying("Yes."))
    assert not tab.page.locator(".message .bar").is_visible()


def test_the_first_answer_is_enough_to_see_the_page(
    open_tab: OpenTab, server: ServerProcess
) -> None:
    """The page is painted, styled and readable while every other request is held back."""
    tab = open_tab(server.url, ready=False)
    held: list[Any] = []
    holding = [True]
    tab.page.route(
        lambda url: not url.endswith("/"),
        lambda route: held.append(route) if holding[0] else route.continue_(),
    )
    tab.page.goto(tab.url, wait_until="commit")
    tab.until(lambda: tab.page.locator("#text").is_visible())
    tab.until(
        lambda: tab.page.evaluate("performance.getEntriesByName('first-contentful-paint').length")
    )
    assert tab.page.evaluate("getComputedStyle(document.body).display") == "grid"
    assert tab.page.get_by_role("button", name="Send").is_visible()
    # All modules are named in that answer, so that what comes next is asked for at once.
    named = tab.page.locator("link[rel=modulepreload], script[src]").count()
    assert named >= 8
    tab.until(lambda: len(held) >= named)
    assert all("/page/" in route.request.url for route in held)
    holding[0] = False  # requests of these scripts pass
    for route in held:
        route.continue_()
    tab.until_ready()
    scripts = {request.url for request in tab.requests if request.url.endswith(".js")}
    assert scripts == {route.request.url for route in held}


AXE = """async () => {
  const rules = Object.fromEntries(["label-content-name-mismatch", "target-size"].map((id) => [id, { enabled: true }]));
  const { violations } = await axe.run(document, { preload: false, resultTypes: ["violations"], rules });
  return violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ target }) => target.join(" ")).join(", ")}`);
}"""


def findings(tab: Tab, where: str) -> list[str]:
    """Return the violations that axe-core finds on the current page."""
    return [f"{where}: {found}" for found in tab.page.evaluate(AXE)]


def load_axe(tab: Tab) -> None:
    """Load the script that `findings` needs into the page."""
    axe = importlib.util.find_spec("axe_playwright_python")
    assert axe is not None, "axe-playwright-python is part of '.[page]'"
    assert axe.origin is not None
    tab.page.evaluate((Path(axe.origin).parent / "axe.min.js").read_text("utf-8"))


def test_axe_finds_nothing(full: Tab) -> None:
    """A conversation and the cache view, a dialog, an error, an empty page, and a phone; contrast,
    too.
    """
    load_axe(full)
    full.replies.last.locator("summary").first.click()
    full.page.locator("#cache .node").last.click()
    found = findings(full, "conversation")
    assert full.page.locator("#live").get_attribute("aria-live") == "polite"
    full.page.keyboard.press("Control+,")
    full.page.locator("#dialog").wait_for()
    found += findings(full, "settings")
    full.page.keyboard.press("Escape")
    full.until_closed()
    full.page.set_viewport_size({"width": 390, "height": 844})
    full.settle()
    found += findings(full, "phone")
    full.page.get_by_role("button", name="Cache", exact=True).click()
    full.settle()
    found += findings(full, "cache on a phone")
    full.page.set_viewport_size({"width": 1400, "height": 900})
    full.expected.append("status of 400")
    full.begin("An error, please.", {"grammar": "root ::= nonsense"})
    full.messages.last.get_by_role("alert").wait_for()
    found += findings(full, "error")
    full.page.keyboard.press("Control+j")
    full.page.get_by_role("heading", name="Start a conversation").wait_for()
    found += findings(full, "empty")
    assert not found, "\n".join(found)
    full.page.evaluate("document.querySelector('#text').removeAttribute('aria-label')")
    full.page.evaluate("document.querySelector('#text').removeAttribute('placeholder')")
    full.page.evaluate("document.querySelector('#title').style.color = '#777'")
    assert len(findings(full, "broken")) == 2  # it does find what is wrong
