"""Endpoints of the page: Markdown as safe HTML, and files of a directory."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import signal
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl import page as assets
from pyctl.page.markdown import to_html
from pyctl.page.markdown_process import MAX_TEXT_BYTES, MarkdownProcess, plain_html
from pyctl.server.server_settings import ServerSettings
from tests.effort import examples
from tests.unit.files.test_pdf_file import pdf, says
from tests.unit.server.fake import Bench, play

TAGS = re.compile(
    "p|h[1-6]|ul|ol|li|blockquote|pre|code|span|em|strong|s|a|br|hr|table|thead|tbody|tr|th|td|div|button|img"
    "|math|mrow|mi|mn|mo|mtext|msup|msub|msubsup|mfrac|msqrt|mroot|mover|munder|munderover|mtable|mtr|mtd|mspace|mstyle"
    "|mpadded|mphantom|menclose|sub|sup"
)
"""All that HTML of Markdown is made of."""

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<a href='x' onclick=alert(1)>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](vbscript:x) [y](file:///etc/passwd) [z](data:text/html;base64,xx)",
    "![x](javascript:alert(1))",
    "![t](http://tracker.example/x.png)",
    "![t](//tracker.example/x.png 'title\" onload=\"alert(1)')",
    "![t](data:image/svg+xml;base64,PHN2Zz4=)",
    '[x](http://a "on\\" onmouseover=alert(1) x=\\"")',
    '<http://a.example/"onmouseover=alert(1)>',
    "[r]: javascript:alert(1)\n\n[r]",
    '```"><script>alert(1)</script>\nx\n```',
    "```html\n<script>alert(1)</script>\n```",
    "$\\href{javascript:alert(1)}{x}$",
    "$\\text{<script>alert(1)</script>}$",
    "$\\style{background:url(http://tracker.example)}{x}$",
    "$$\n\\class{x}{y} \\unicode{60}script\\unicode{62}\n$$",
    "<style>@import 'http://tracker.example'</style>",
    "<iframe src=http://tracker.example></iframe><svg onload=alert(1)>",
    "<!-- --><base href=http://tracker.example>",
    "|a|\n|-|\n|<script><br onload=alert(1)>|",
    "<sub onclick=alert(1)>x</sub><sup></sub><br/onload=alert(1)>",
    'https://a.example/"onmouseover=alert(1) javascript://x vbscript://x data://x',
    "- [x] <script>\n- [ ] [x](javascript:alert(1))",
    "\\begin{align}\n\\href{javascript:alert(1)}{x} <script>\n\\end{align}",
)


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


@pytest.fixture
def process() -> Iterator[MarkdownProcess]:
    process = MarkdownProcess(seconds=60.0, all_seconds=600.0)
    yield process
    process.close()


def test_what_takes_too_long_is_plain_and_delays_nothing_else(process: MarkdownProcess) -> None:
    """A text that stops the renderer or is too long is shown plain, and the others are rendered:
    Markdown of a model must not hang the page.
    """
    slow = "slow"
    long = "x" * (MAX_TEXT_BYTES + 1)

    def texts() -> Iterator[str]:
        for text in ("*a*", slow, "*b*", long, "\udcff*c*"):
            if text == slow:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGSTOP)  # never answers
            process.seconds = 0.1 if text == slow else 60.0
            yield text

    found = process.render(texts())
    assert found == [
        to_html("*a*"),
        plain_html(slow),
        to_html("*b*"),
        plain_html(long),
        to_html("?*c*"),
    ]


def test_a_process_that_dies_is_replaced(process: MarkdownProcess) -> None:
    assert process.render(["*a*"]) == [to_html("*a*")]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # until it has ended
    assert process.render(["*b*"]) == [to_html("*b*")]


def test_the_endpoint() -> None:
    """The endpoint renders up to 64 texts, refuses anything else, and needs the key like the rest
    of the API.
    """
    bench = Bench(play("x"))
    bench.service.shared.markdown.seconds = 60.0
    bench.service.shared.markdown.all_seconds = 600.0
    texts = ["**a**", "<script>", ""]
    try:
        answer = bench.post("/page/markdown", {"texts": texts})
        assert answer.json() == {"html": [to_html(text) for text in texts]}
        for wrong in ({}, {"texts": "a"}, {"texts": [1]}, {"texts": ["a"] * 65}):
            assert bench.post("/page/markdown", wrong).status_code == 400
    finally:
        bench.service.shared.markdown.close()
    assert (
        Bench(play("x"), settings=ServerSettings(api_keys=("k",)))
        .post("/page/markdown", {})
        .status_code
        == 401
    )


def test_pdf_files_are_read_for_pages_of_this_server_only() -> None:
    client = Bench(play("x"), settings=ServerSettings()).client
    answer = client.post("/page/pdf", content=pdf(says("A lamp")))
    assert answer.json() == {"text": "A lamp"}
    assert client.post("/page/pdf", content=b"x").status_code == 400
    assert (
        client.post("/page/pdf", content=b"x", headers={"Origin": "http://other"}).status_code
        == 403
    )
    assert (
        Bench(play("x"), settings=ServerSettings(api_keys=("k",))).post("/page/pdf", {}).status_code
        == 401
    )


def test_a_directory_is_served_beside_the_api(tmp_path: Path) -> None:
    """A directory is served below the prefix beside the API. No path or link leads out of it, and
    with a key its files need it, however their path is written.
    """
    site = tmp_path / "site"
    site.mkdir()
    (site / "index.html").write_text("mine")
    (site / "a.css").write_text("p{}")
    (tmp_path / "secret").write_text("no")
    (site / "link").symlink_to(tmp_path / "secret")
    client = Bench(
        play("x"), settings=ServerSettings(static_path=str(site), api_prefix="/llm")
    ).client
    assert client.get("/llm/").text == "mine"
    assert client.get("/llm/a.css").headers["content-type"].startswith("text/css")
    assert client.get("/llm/health").json() == {"status": "ok"}
    for path in ("/", "/a.css", "/llm/none", "/llm/../secret", "/llm/%2e%2e/secret", "/llm/link"):
        assert client.get(path).status_code == 404, path
        assert client.get(path).text != "no", path
    assert (
        Bench(play("x"), settings=ServerSettings(show_page=False)).client.get("/").status_code
        == 404
    )
    keyed = Bench(play("x"), settings=ServerSettings(static_path=str(site), api_keys=("k",))).client
    assert [keyed.get("/a.css", headers=h).status_code for h in ({}, {"X-Api-Key": "k"})] == [
        401,
        200,
    ]
    for path in (
        "/page/../a.css",
        "/page/%2e%2e/a.css",
        "/page/..%2fa.css",
        "/page/x/../../a.css",
        "/page/app.js",
    ):
        assert keyed.get(path).status_code == 401, path


def test_the_page_is_small_public_and_held_to_its_policy() -> None:
    """The page loads without a key, within 135 kB, from listed files only, and under a policy
    without inline code. The data it shows need the key.
    """
    client = Bench(play("x"), settings=ServerSettings(api_keys=("k",), api_prefix="/llm")).client
    first = client.get("/llm/")
    assert first.status_code == 200
    names = re.findall(r'(?:src|href)="(page/[^"]+)"', first.text)
    assert "page/app.js" in names
    answers = [first, *(client.get(f"/llm/{name}") for name in names)]
    for answer in answers:
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        again = client.get(
            answer.request.url.path, headers={"If-None-Match": answer.headers["etag"]}
        )
        assert again.status_code == 304
        assert again.content == b""
    assert sum(len(answer.content) for answer in answers) < 135_000
    scripts = list((Path(assets.__file__).parent / "static").glob("*.js"))
    assert {path.name for path in scripts} == {name[5:] for name in names}
    for script in scripts:
        lines = script.read_text("utf-8").splitlines()
        assert max(map(len, lines)) <= 120, script
        assert len(lines) <= 400, script
        assert not any(line.count("`") % 2 for line in lines), "what is served has no indentation"
    (style,) = re.findall(r"<style>(.*?)</style>", first.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in first.headers["content-security-policy"]
    for path in (
        "/llm/page/none.js",
        "/llm/page/../app.py",
        "/llm/page/%2e%2e%2fassets.py",
        "/llm/page/page.css",
    ):
        assert client.get(path).status_code in (401, 404), path
    assert client.post("/llm/page/markdown", {"texts": []}).status_code == 401
    assert client.get("/llm/cache").status_code == 401
    off = Bench(play("x"), settings=ServerSettings(show_page=False)).client
    assert [off.get(path).status_code for path in ("/", "/index.html", "/page/app.js")] == [404] * 3
    assert off.get("/props").json()["ui"] is False
