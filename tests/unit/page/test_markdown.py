"""Markdown to HTML: hostile text does nothing, and what models write is shown."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.page.markdown import to_html
from tests.effort import examples
from tests.unit.page.hostile import HOSTILE

TAGS = re.compile(
    "p|h[1-6]|ul|ol|li|blockquote|pre|code|span|em|strong|s|a|br|hr|table|thead|tbody|tr|th|td|div|button|img"
    "|math|mrow|mi|mn|mo|mtext|msup|msub|msubsup|mfrac|msqrt|mroot|mover|munder|munderover|mtable|mtr|mtd|mspace|mstyle"
    "|mpadded|mphantom|menclose|sub|sup"
)
"""All that HTML of Markdown is made of."""


class Seen(HTMLParser):
    """Notes what a browser would make of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def check(html: str) -> None:
    """Check that nothing in ``html`` runs, is fetched, or looks as the page must not look."""
    for tag, attributes in Seen(html).tags:
        assert TAGS.fullmatch(tag), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), name
            assert name not in ("srcset", "action", "formaction", "background", "id", "name")
            if name == "href":
                assert (value or "").partition(":")[0].lower().strip() not in (
                    "javascript",
                    "vbscript",
                    "data",
                    "file",
                )
            if name == "src":
                assert tag == "img"
                assert (value or "").startswith("data:image/")
            assert name != "style"
        if tag == "a":
            assert attributes["rel"] == "noopener noreferrer nofollow"


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_markdown_comes_out_as_text(text: str) -> None:
    check(to_html(text))
    check(to_html(f"- > {text}\n\n| a |\n|---|\n| {text} |\n"))


PIECES = st.sampled_from(
    [
        *HOSTILE,
        "\n",
        "\n\n",
        "`",
        "```",
        "~~~",
        "$",
        "$$",
        "\\(",
        "\\]",
        "[",
        "](",
        "<",
        "|",
        "\\",
        "&",
        "* ",
    ]
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(PIECES | st.text(max_size=8), max_size=12))
def test_no_mixture_of_hostile_pieces_does_more(pieces: list[str]) -> None:
    check(to_html("".join(pieces)))


def test_what_people_write() -> None:
    text = (
        "# Title\n\nSome **bold**, `code`, ~~old~~, [a "
        "link](https://example.org/a?b=c&d).\nNext\n\n1. one\n2. two"
    )
    html = to_html(text)
    assert html.startswith("<h1>Title</h1>")
    link = 'href="https://example.org/a?b=c&amp;d"'
    for part in ("<strong>bold</strong>", "<code>code</code>", "<s>old</s>", "<br", "<ol>", link):
        assert part in html
    code = to_html("```python\ndef f(x): return '<'  # y\n```")
    assert '<span class="k">def</span>' in code
    assert "<span>python</span><button" in code
    assert "&lt;" in code
    assert "<span>nonsense</span>" in to_html("```nonsense\na < b\n```")
    assert to_html("![dot](data:image/png;base64,iVBORw0KGgo=)").count("<img") == 1


def test_formulas_become_mathml_and_money_does_not() -> None:
    assert "<msup><mi>x</mi><mn>2</mn></msup>" in to_html("so $x^2$ it is")
    assert '<math display="block">' in to_html("\\[ \\frac{a}{b} \\]")
    block = to_html("before\n$$\na - b\n- c\n$$\nafter")
    assert 'display="block"' in block
    assert "<ul>" not in block
    assert "<p>after</p>" in block
    assert to_html("it costs $5 and $6 today") == "<p>it costs $5 and $6 today</p>\n"
    assert "<code>\\frac{</code>" in to_html("$\\frac{$")
    for text in (
        "$$\\begin{aligned}A\\end{aligned}$$",
        "> \\begin{align}\n> A\n> \\end{align}\n\nafter",
    ):
        html = to_html(text.replace("A", "a &= b \\\\ c &= d"))
        assert html.count("<mtr>") == 2, "no numbers of equations"
        assert html.count("<mtd") == 4, "no numbers of equations"
        assert "begin" not in html, "no numbers of equations"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "See https://a.org/b_(c). (https://d.org/)",
            ['href="https://a.org/b_(c)"', "</a>. (", 'href="https://d.org/"'],
        ),
        (
            "ftp://a.org a.org `https://a.org` https://)",
            ["<p>ftp://a.org a.org <code>", "</code> https://)</p>"],
        ),
        (
            "- [ ] one\n- [x] **two**\n- [y] no",
            ['"todo">one<', '"done"><strong>two<', "<li>[y] no<"],
        ),
        ("|a|\n|-|\n|x<br>y <b>|", ["<td>x<br>y &lt;b&gt;</td>"]),
        ("H<sub>2</sub>O `<br>`", ["H<sub>2</sub>O <code>&lt;br&gt;</code>"]),
    ],
)
def test_links_boxes_and_the_tags_that_models_write(text: str, parts: list[str]) -> None:
    html = to_html(text)
    assert [part for part in parts if part not in html] == [], html
