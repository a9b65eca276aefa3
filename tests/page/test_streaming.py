"""Replies are rendered as they stream, at a bounded rate; without a renderer they keep their
lines.
"""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.measure.server_process import ServerProcess
from tests.page.browser import Tab
from tests.page.conftest import OpenTab
from tests.page.test_keeping import IN_VIEW
from tests.page.test_looks import PHONE, findings, load_axe

STREAM = """() => {
  const real = window.fetch, encoder = new TextEncoder();
  window.fetch = async (path, options) => {
    if (!path.endsWith("v1/chat/completions")) return real(path, options);
    let stream;
    const body = new ReadableStream({ start: (given) => (stream = given) });
    const event = (data) => stream.enqueue(encoder.encode(`data: ${data}\\n\\n`));
    window.push = (content) => event(JSON.stringify({ choices: [{ delta: { content } }] }));
    const ending = ['{"choices": [{"delta": {}, "finish_reason": "stop"}]}', "[DONE]"];
    window.finish = () => ending.forEach(event) ?? stream.close();
    return new Response(body);
  };
}"""

SAME = (
    "(e, html) => { const made = e.cloneNode(); made.innerHTML = html; return "
    "made.isEqualNode(e); }"
)


def begin(tab: Tab, text: str) -> Any:
    """Begin a reply with ``text`` so far; return its body."""
    tab.page.evaluate(STREAM)
    tab.begin("Go on.")
    tab.until(lambda: tab.page.evaluate("window.push !== undefined"))
    tab.page.evaluate("text => push(text)", text)
    return tab.replies.last.locator(".body")


def finish(tab: Tab) -> None:
    tab.page.evaluate("finish()")
    tab.until_idle()


@pytest.mark.parametrize(
    ("begun", "rest", "found", "n"),
    [
        ("Tips:\n\n1. **Beans**: rice.\n2. **Pl", "an**: write.\n\nDone.", "ol li strong", 2),
        ("So:\n\n```python\ndef f(x):\n    return", " x\n```\n", ".code pre .k", 2),
        ("| Name | Age |\n|---|---:|\n| Ann | 4", "1 |\n", "td", 2),
        ("A `b", "` c\n-", "p code", 1),
    ],
)
def test_a_reply_is_rendered_as_it_streams(
    tab: Tab, begun: str, rest: str, found: str, n: int
) -> None:
    body = begin(tab, begun)
    tab.until(lambda: body.locator(found).count() == n)
    assert not any(mark in body.inner_text() for mark in ("**", "`"))
    load_axe(tab)
    assert not findings(tab, found)
    tab.page.evaluate("text => push(text)", rest)
    finish(tab)
    answer = tab.context.request.post(f"{tab.url}page/markdown", data={"texts": [begun + rest]})
    assert body.evaluate(SAME, answer.json()["html"][0]), "the end is what the whole text gives"


def test_one_text_at_a_time_is_rendered_and_what_waits_is_shown(tab: Tab) -> None:
    held: list[Any] = []
    tab.page.route("**/page/markdown", lambda route: held.append(route))
    body = begin(tab, "One,\n two")
    for _ in range(9):
        tab.page.evaluate("push(' and on')")
        tab.settle()
    tab.until(lambda: "One,\n two and on" in body.inner_text())
    assert len(held) == 1
    tab.page.unroute("**/page/markdown")  # the one that waits goes on
    tab.until(lambda: body.inner_text().strip() == "One,\ntwo" + " and on" * 9)
    finish(tab)


def test_an_outage_loses_no_line_and_is_made_good(tab: Tab) -> None:
    tab.expected.append("net::ERR_")
    text = "Here:\n\n```python\nx = 1\ny = 2\n```\n\n1. one\n2. two"
    begin(tab, text)
    finish(tab)
    tab.page.route("**/page/markdown", lambda route: route.abort())
    tab.reload()
    body = tab.replies.last.locator(".body")
    assert body.inner_text().strip() == text
    tab.page.unroute("**/page/markdown")
    tab.until(lambda: body.locator(".code .n, ol li").count() == 4)


def test_the_last_message_is_edited_in_view(tab: Tab) -> None:
    begin(tab, "\n".join(["A line."] * 24))
    finish(tab)
    for height in range(660, 900, 20):  # the message is in sight, in part or not
        tab.page.set_viewport_size({"width": 1200, "height": height})
        tab.page.locator("#scroll").evaluate("e => { e.scrollTop = e.scrollHeight; }")
        tab.settle()
        tab.page.press("#text", "ArrowUp")
        tab.settle()
        for shown in (
            tab.page.locator(".edit"),
            tab.page.get_by_role("button", name="Send in a new branch"),
        ):
            assert shown.evaluate(IN_VIEW), height
        tab.page.keyboard.press("Escape")


def test_the_editor_is_as_high_as_its_text(tab: Tab) -> None:
    text = (
        "Three lines of text that are one in the file, since this one goes on and on until it "
        "fills "
    ) * 3
    tab.page.evaluate(STREAM)
    tab.begin(text)
    tab.until(lambda: tab.page.evaluate("window.push !== undefined"))
    finish(tab)
    tab.page.press("#text", "ArrowUp")
    field = tab.page.locator(".edit")
    lines = "e => e.clientHeight / parseFloat(getComputedStyle(e).lineHeight)"
    hidden = "e => [e.scrollHeight - e.clientHeight, e.scrollTop]"
    assert field.evaluate(hidden) == [0, 0]
    assert field.evaluate(lines) > 3
    field.fill(text * 2)
    assert field.evaluate(hidden) == [0, 0], "it grows"


def test_words_in_a_table_stay_whole_on_a_phone(open_tab: OpenTab, server: ServerProcess) -> None:
    tab = open_tab(server.url, {**PHONE, "screen": PHONE["viewport"]})
    words = ["Anniversary", "Responsibilities", "Kartoffelpuffer", "Rechtschreibung"]
    row = f"| {' | '.join(words)} |\n"
    body = begin(tab, f"{row}{'|---' * 4}|\n{row}")
    finish(tab)
    lines = (
        "e => { const r = new Range(); r.selectNodeContents(e); return r.getClientRects().length; }"
    )
    assert [cell.evaluate(lines) for cell in body.locator("th, td").all()] == [1] * 8
    assert body.locator(".table").evaluate("e => e.scrollWidth > e.clientWidth")


EQUATIONS = {
    "aligned": r"x &= 1 + 2 \\ yyyyyy &= 3",
    "align": r"a &= b & ccccc &= d \\ eeee &= f & g &= h",
    "eqnarray": r"a &=& b \\ cccc &=& d",
}

PLACES = """(math, mark) => {
  const boxes = [...math.querySelectorAll("mo")].filter((mo) => mo.textContent === mark)
    .map((mo) => mo.getBoundingClientRect());
  return boxes.map(({ left, height }) => [left, height]);
}"""
"""A function that returns the left edge of each of these signs in a formula, and its height, in
pixels.
"""


@pytest.mark.parametrize("name", EQUATIONS)
def test_equations_line_up(tab: Tab, name: str) -> None:
    body = begin(tab, f"$$\\begin{{{name}}} {EQUATIONS[name]} \\end{{{name}}}$$\n")
    finish(tab)
    math = body.locator("math")
    math.wait_for()
    lefts = [left for left, _ in math.evaluate(PLACES, "=")]
    n = len(lefts) // 2  # in a row
    assert n == (2 if name == "align" else 1)
    assert lefts[:n] == pytest.approx(lefts[n:], abs=1)
    cell = "m => m.querySelector('mtd').lastChild.getBoundingClientRect().right"
    assert 0 <= lefts[0] - math.evaluate(cell) < 8, "the gap before a sign is the sign's own"


def test_columns_of_an_array_have_their_sides(tab: Tab) -> None:
    body = begin(tab, "$$\\begin{array}{lcr} i & i & i \\\\ mmmm & mmmm & mmmm \\end{array}$$\n")
    finish(tab)
    body.locator("math").wait_for()
    sides = """math => [...math.querySelectorAll("mtr")].map((row) => [...row.children].map((cell) => {
      const { left } = cell.firstChild.getBoundingClientRect(), { right } = cell.lastChild.getBoundingClientRect();
      return [left, (left + right) / 2, right];
    }))"""
    above, below = body.locator("math").evaluate(sides)
    for column, side in enumerate(("left", "center", "right")):
        which = ("left", "center", "right").index(side)
        assert above[column][which] == pytest.approx(below[column][which], abs=1), side


def test_brackets_grow_with_a_matrix(tab: Tab) -> None:
    """Brackets grow with a matrix in a font for formulas, if one of those that the page names is
    installed.
    """
    body = begin(tab, "$$\\begin{pmatrix} 1 \\\\ 2 \\\\ 3 \\\\ 4 \\end{pmatrix}$$\n")
    finish(tab)
    math = body.locator("math")
    math.wait_for()
    named = math.evaluate(
        "m => getComputedStyle(m).fontFamily.split(',').map((name) => name.trim())"
    )
    assert {'"Latin Modern Math"', '"Cambria Math"'} < set(named)
    wide = """names => {
      const pen = document.createElement("canvas").getContext("2d");
      const width = (font) => { pen.font = "40px " + font; return pen.measureText("mW\u222b").width; };
      return names.some((name) => width(name + ", monospace") !== width("monospace"));
    }"""
    if not tab.page.evaluate(wide, [name for name in named if name != "math"]):
        pytest.skip("no font for formulas here")
    ((_, height),) = math.evaluate(PLACES, "(")
    assert height > 0.8 * math.locator("mtable").evaluate("m => m.getBoundingClientRect().height")


@pytest.mark.parametrize(("height", "sends"), [(740, True), (400, False)])
def test_enter_sends_unless_a_keyboard_lies_on_the_screen(
    open_tab: OpenTab, server: ServerProcess, height: int, sends: bool
) -> None:
    screen = {"width": 360, "height": 740}
    tab = open_tab(
        server.url, {**PHONE, "screen": screen, "viewport": {"width": 360, "height": height}}
    )
    tab.page.evaluate(STREAM)
    tab.page.fill("#text", "Hello")
    tab.page.press("#text", "Enter")
    assert tab.page.input_value("#text") == ("" if sends else "Hello\n")


def put(tab: Tab, stats: dict[str, Any]) -> None:
    """Open a conversation of one reply that cost this."""
    message = {
        "id": "m",
        "parent": None,
        "role": "assistant",
        "content": "Yes.",
        "created": 1,
        "stats": stats,
    }
    tree = {
        "id": "c",
        "title": "T",
        "updated": 1,
        "messages": {"m": message},
        "leaf": "m",
        "pick": {},
        "system": "",
    }
    save = (
        "async (t) => { sessionStorage.open = 'c'; await (await "
        "import('./page/store.js')).save(t); }"
    )
    tab.page.evaluate(save, tree)
    tab.reload()


def test_nearly_full_context_and_nested_prompt_are_reported(tab: Tab) -> None:
    miss = {"position": 81, "nearest": 41, "was": "so it is. Write a title", "is": "so it is."}
    cache = {"source": "live", "restored": "", "saved": [], "miss": miss}
    times = {"prompt_n": 700, "prompt_ms": 10, "predicted_n": 9, "predicted_ms": 47_637_000}
    put(tab, {"cache_n": 14_000, **times, "cache": cache})
    assert tab.page.locator("#context").inner_text() == "14,709 of 16,384 tokens"
    assert "differs" not in tab.replies.last.locator(".costs .line").inner_text()
    assert "9 generated in 13 h 13 min" in tab.legend()
    assert (
        "ends at token 81, within a recent prompt" in tab.replies.last.locator(".miss").inner_text()
    )
    tab.page.set_viewport_size(PHONE["viewport"])
    put(tab, {"cache_n": 14_800, **times})
    assert tab.page.locator("#context").inner_text() == "15,509 of 16,384 tokens: nearly full"
    assert tab.page.locator("#context").evaluate("e => e.scrollWidth <= e.clientWidth")


def test_a_full_context_names_what_fills_it_and_the_flag(tab: Tab) -> None:
    tab.expected.append("status of 400")
    with tab.page.expect_file_chooser() as choosing:
        tab.page.get_by_role("button", name="Attach").click()
    choosing.value.set_files(
        [{"name": "long.txt", "mimeType": "text/plain", "buffer": b"lamp door " * 11_000}]
    )
    tab.page.get_by_role("button", name="Remove long.txt").wait_for()
    tab.begin("Sum it up.")
    said = tab.messages.last.get_by_role("alert").inner_text()
    parts = (
        "the context holds 16,384",
        "The largest part is long.txt, 100 % of the text",
        "with -c 32768.",
    )
    assert [part for part in parts if part not in said] == [], said
