from __future__ import annotations

import random
import re
from functools import partial

import pytest
from rich.console import Console
from rich.text import Text

from pyctl.terminal.rendering import THEME, GrowingText, MarkdownBlocks
from tests.unit.terminal.screen import Screen


def blocks_of(text: str, size: int = 3, **limits: int) -> list[str]:
    cut = MarkdownBlocks(**limits)
    made = []
    for at in range(0, len(text), size):
        made += cut.feed(text[at : at + size])
    return [block.text for block in (*made, *cut.finish())]


@pytest.mark.parametrize(
    "expected",
    [
        ["one\ntwo", "three"],
        ["# Title", "text", "## More", "text"],
        ["- a\n\n- b\n\n  more of b\n- c", "after"],
        ["1. a\n   ```sh\n   x\n\n   y\n   ```\n2. b", "after"],
        ["1. a", "```sh\nls\n\n# no title\n```", "2. b"],
        ["~~~\n```\n\n~~~", "text"],
        ["text", "| a | b |\n|---|--:|\n| 1 | 2 |", "text"],
        ["> quote\n> more", "text"],
    ],
)
def test_blocks_are_cut_where_meaning_ends(expected: list[str]) -> None:
    for glue in ("\n\n", "\n\n\n"):
        assert blocks_of(glue.join(expected)) == expected
        assert blocks_of(glue.join(expected), size=10**6) == expected
        assert blocks_of(glue.join(expected) + "\n") == expected


def test_a_fence_and_a_table_begin_without_an_empty_line() -> None:
    assert blocks_of("text\n```\ncode\n```\nmore\n| a |\n|---|\n| 1 |") == [
        "text",
        "```\ncode\n```",
        "more",
        "| a |\n|---|\n| 1 |",
    ]


def test_a_large_block_is_cut_and_its_parts_keep_their_head() -> None:
    cut = partial(blocks_of, max_block=40)
    code = "\n".join(f"line = {number}" for number in range(20))
    parts = cut(f"```python\n{code}\n```")
    assert len(parts) > 3
    assert all(part.startswith("```python\n") for part in parts)
    inside = [line for part in parts for line in part.split("\n") if "```" not in line]
    assert "\n".join(inside) == code
    rows = "\n".join(f"| {number} | x |" for number in range(20))
    parts = cut(f"| a | b |\n|---|---|\n{rows}")
    assert all(part.startswith("| a | b |\n|---|---|\n") for part in parts)
    assert "\n".join(line for part in parts for line in part.split("\n")[2:]) == rows
    items = [f"- item {number}" for number in range(40)]
    assert len(cut("\n".join(items))) > 5
    assert "\n".join(cut("\n".join(items))) == "\n".join(items)
    assert "".join(cut("x" * 500)) == "x" * 500
    assert max(map(len, cut("x" * 500))) <= 50


class Clock:
    """Stands still, so that everything is drawn, or says at first that it is late, so that nothing
    is.
    """

    def __init__(self, draws: bool) -> None:
        self._seconds = 0.0 if draws else 1.0

    def __call__(self) -> float:
        seconds = self._seconds
        self._seconds = 0.0
        return seconds


def shown(
    text: str, *, width: int = 40, height: int = 12, size: int = 3, draws: bool = True
) -> Screen:
    """Return the screen after ``text`` has grown by ``size`` characters at a time."""
    screen = Screen()
    console = Console(
        file=screen,
        force_terminal=True,
        force_interactive=True,
        width=width,
        height=height,
        theme=THEME,
    )
    growing = GrowingText(console, clock=Clock(draws))
    for at in range(0, len(text), size):
        growing.feed(text[at : at + size])
    growing.finish()
    return screen


MIXED = """\
# Title
A paragraph with **bold** words that is longer than one row of this screen.
Its second line.

1. one
2. two
   - nested

```python
for number in range(10):
    print(number)
```

| name | n |
|---|--:|
| one | 1 |
| seven | 700 |

> quoted

[a link](http://x.org/a), `code`, ~~gone~~, <b>tag</b>
"""
ROWS = """\
Title

A paragraph with bold words that is
longer than one row of this screen.
Its second line.

 1 one
 2 two
    • nested

  for number in range(10):
      print(number)

 name     n
 ──────────
 one      1
 seven  700

▌ quoted

a link (http://x.org/a), code, gone,
<b>tag</b>"""


@pytest.mark.parametrize("size", [1, 3, 7, 50, 10**6])
def test_markdown_looks_the_same_however_it_comes(size: int) -> None:
    assert shown(MIXED, size=size).rows() == ROWS.split("\n")
    assert shown(MIXED, size=size, draws=False).rows() == ROWS.split("\n")


@pytest.mark.parametrize("height", [6, 40])
@pytest.mark.parametrize(
    "text", ["word " * 120, "- an item of a list that is longer than a row\n" * 12]
)
def test_a_terminal_that_becomes_narrower_doubles_and_loses_nothing(text: str, height: int) -> None:
    """The letters on the screen are those of a terminal that kept its width, although a narrower
    one wraps the lines that were drawn before.
    """
    whole = shown(text, width=100, height=height)
    screen = Screen()
    console = Console(
        file=screen,
        force_terminal=True,
        force_interactive=True,
        width=100,
        height=height,
        theme=THEME,
    )
    growing = GrowingText(console, clock=Clock(True))
    for at in range(0, len(text), 10):
        if at in (60, 200, 300):
            console.width -= 23
            screen.resize(console.width)
        growing.feed(text[at : at + 10])
    growing.finish()
    letters = [re.sub(r"[\s─]", "", "".join(each.rows())) for each in (whole, screen)]
    assert letters[0] == letters[1]


def test_what_is_printed_is_not_drawn_again() -> None:
    items = "\n".join(f"- item {number}" for number in range(100))
    screen = shown(items, height=10, size=10)
    assert screen.rows() == [f" • item {number}" for number in range(100)]
    assert screen.n_erased < 100 * 10


@pytest.mark.parametrize(
    "unit", ["word ", "a line of text\n", "- item\n", "a paragraph\n\n", "```\ncode\n```\n"]
)
def test_drawing_takes_a_share_of_the_time_of_a_reply(unit: str) -> None:
    """A long reply that is drawn anew as it grows costs at most twice its length and a tenth of its
    time. Drawing it whole at each piece would be quadratic.
    """
    now = 0.0
    n_rendered = 0

    def render(text: str) -> Text:
        nonlocal now, n_rendered
        now += len(text)
        n_rendered += len(text)
        return Text(text)

    console = Console(
        file=Screen(), force_terminal=True, force_interactive=True, width=40, height=12
    )
    growing = GrowingText(console, render, lambda: now)
    for _ in range(500):
        growing.feed(unit)
        now += 20
    growing.finish()
    once = 500 * len(unit)
    assert 0.8 * once < n_rendered < 2 * once + 0.1 * now


def test_words_of_any_text_are_kept_at_any_width() -> None:
    """A screen of 60 columns has every word of a text with random Markdown, and narrow screens and
    deep quotes raise no error.
    """
    draw = random.Random(8)
    signs = (
        *(
            "# ",
            "- ",
            "1. ",
            "```\n",
            "> ",
            "*",
            "**",
            "`",
            "<b>",
            "\n",
            "\n\n",
            " ",
            "    ",
            "| ",
            "|---|\n",
            "界",
        ),
        *("[x]: http://a\n", "![p](q)", "](", "<"),
    )
    for width in (1, 8, 40, 60):
        for _ in range(8):
            words = [f"w{number}w" for number in range(12)]
            text = "".join(draw.choice(signs) + word + draw.choice((" ", "\n")) for word in words)
            seen = " ".join(shown(text, width=width, size=4).rows())
            assert width < 60 or [word for word in words if word not in seen] == [], text
    assert "deep" in shown("> " * 40 + "deep").rows()[-1]
