"""Markdown to HTML that a page can show as it is: no script, no request, no styles.

Every text may be hostile, and neither parsing nor highlighting is bounded in time. So a server does
not call this; it uses a `MarkdownProcess`, which can be killed.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from html import escape
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import latex2mathml.converter
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

__all__ = ["to_html"]

_DELIMITERS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))

_BARE = re.compile(
    r"\\begin\{((?:align|aligned|alignat|cases|equation|eqnarray|gather|multline"
    r"|[bpvBV]?matrix)\*?)\}"
)
"""The start of a formula that has no delimiters."""

_URL = re.compile('https?://\\w[^][{}\\s<>"`|]*', re.IGNORECASE)

_BOX = re.compile(r"\[([ xX])\] ")

_TAG = re.compile("<br ?/?>|</?su[bp]>")  # other tags are text

_MATHML = re.compile(
    "math|mrow|mi|mn|mo|ms|mtext|mspace|msup|msub|msubsup|mfrac|msqrt|mroot|mover|munder|munderover"
    "|mtable|mtr|mtd|mstyle|mpadded|mphantom|menclose|mmultiscripts|mprescripts|none"
)
_MATHML_ATTRIBUTES = re.compile(
    "display|mathvariant|stretchy|fence|form|largeop|movablelimits|accent|accentunder|lspace|rspace"
    "|minsize|maxsize|columnalign|rowspacing|columnspacing|columnlines|rowlines|displaystyle"
    "|scriptlevel|linethickness|notation|separator|width|height|depth|symmetric"
)


def to_html(text: str) -> str:
    """Return ``text`` as HTML; any text is Markdown of some kind."""
    return str(_parser().render(text))


@cache
def _parser() -> MarkdownIt:
    """Return the parser of Markdown, with the page's rules for formulas, links, pictures and
    tables.
    """
    options = {"html": True, "linkify": True, "breaks": True, "maxNesting": 32}
    parser = MarkdownIt("js-default", options).disable("html_block")
    parser.core.ruler.disable("linkify")  # which also looks for names of hosts
    parser.linkify = SimpleNamespace(match_at_start=_url_at_start)
    parser.inline.ruler.before("escape", "formula", _inline_formula)
    parser.block.ruler.before(
        "fence", "formulas", _block_formula, {"alt": ["paragraph", "list", "blockquote"]}
    )
    rules = {
        "fence": _fence,
        "code_block": _fence,
        "image": _image,
        "link_open": _link,
        "formula": _formula,
    }
    rules |= {"th_open": _cell, "td_open": _cell, "list_item_open": _item, "html_inline": _tag}
    rules["table_open"] = lambda *_: '<div class="table" tabindex="0"><table>\n'
    rules["table_close"] = lambda *_: "</table></div>\n"
    for name, rule in rules.items():
        parser.add_render_rule(name, rule)
    return parser


def _url_at_start(text: str) -> SimpleNamespace | None:
    """Return the address that ``text`` starts with, by the rule for bare links; a sentence around
    it is not part.
    """
    match = _URL.match(text)
    if match is None:
        return None
    punctuation = ".,;:!?'*_~"
    url = match[0].rstrip(punctuation)
    n_unopened = url.count(")") - url.count("(")
    url = url.removesuffix(")" * n_unopened)
    return SimpleNamespace(url=url.rstrip(punctuation))


def _fence(self: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    """Return a block of code with its language and a button that a page makes copy it."""
    token = tokens[index]
    words = token.info.split(maxsplit=1)
    language = words[0] if words else ""
    body = ""
    if language:
        with suppress(ClassNotFound):
            lexer = get_lexer_by_name(language, stripnl=False)
            body = highlight(token.content, lexer, HtmlFormatter(nowrap=True))
    if not body:
        body = escape(token.content)
    name = escape(language[:32] or "text")
    button = '<button type="button" class="copy">Copy</button>'
    head = f'<div class="code-head"><span>{name}</span>{button}</div>'
    lines = f'<pre tabindex="0"><code>{body}</code></pre>'
    return f'<div class="code">{head}{lines}</div>\n'


def _image(self: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    """Return a picture that is in the text itself; of others only a link, so that nothing is
    fetched by reading.
    """
    token = tokens[index]
    address = str(token.attrs.get("src", ""))
    source = escape(address)
    text = self.renderInlineAsText(token.children or [], options, env)
    label = escape(text or "picture")
    if address.startswith("data:image/"):
        return f'<img src="{source}" alt="{label}">'
    return f'<a href="{source}" target="_blank" rel="noopener noreferrer nofollow">{label}</a>'


def _link(self: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    token = tokens[index]
    attributes: dict[str, str | int | float] = {}
    for name in ("href", "title"):
        if name in token.attrs:
            attributes[name] = token.attrs[name]
    attributes["target"] = "_blank"
    attributes["rel"] = "noopener noreferrer nofollow"
    token.attrs = attributes
    return self.renderToken(tokens, index, options, env)


def _cell(self: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    """Return a cell of a table. Its alignment is a class, since the page's policy allows no element
    a style.
    """
    token = tokens[index]
    style = str(token.attrs.get("style", ""))
    side = style.partition(":")[2]
    token.attrs = {}
    if side in ("left", "right", "center"):
        token.attrs = {"class": side}
    return self.renderToken(tokens, index, options, env)


def _item(self: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    """Return an item of a list; the box of a task becomes its class."""
    item = tokens[index]
    inner = item
    if tokens[index + 1].type == "paragraph_open":
        inner = tokens[index + 2]
    box = _BOX.match(inner.content)
    if box and inner.children:
        first = inner.children[0]
        if first.content.startswith(box[0]):
            first.content = first.content.removeprefix(box[0])
            item.attrs = {"class": "todo" if box[1] == " " else "done"}
    return self.renderToken(tokens, index, options, env)


def _tag(self: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    tag = tokens[index].content
    return tag if _TAG.fullmatch(tag) else escape(tag)


# -- formulas
# ----------------------------------------------------------------------------------


def _inline_formula(state: StateInline, silent: bool) -> bool:
    """Parse a formula between delimiters within a line, a rule of markdown-it; False if there is
    none.

    A dollar sign is often money: its formula has no blank inside the delimiters, and no digit
    follows it.
    """
    text = state.src
    start = state.pos
    delimiters = next((pair for pair in _DELIMITERS if text.startswith(pair[0], start)), None)
    if delimiters is None:
        return False
    opening, closing = delimiters
    first = start + len(opening)
    last = text.find(closing, first, state.posMax)
    if last <= first:
        return False
    content = text[first:last]
    if opening == "$":  # an amount of money does not touch both, or a digit follows
        if content[0].isspace() or content[-1].isspace() or "\n\n" in content:
            return False
        after = text[last + 1 : last + 2]
        if after.isdigit():
            return False
    if not silent:
        token = state.push("formula", "math", 0)
        token.content = content
        token.meta = {"block": opening in ("$$", "\\[")}
    state.pos = last + len(closing)
    return True


def _block_formula(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    """Parse a formula that takes whole lines, a rule of markdown-it; False if there is none."""
    start = state.bMarks[first] + state.tShift[first]
    end = state.eMarks[first]
    head = state.src[start:end].strip()
    bare = _BARE.match(state.src, start, end)
    body = first  # the first line that may have the end
    if bare:
        closing: str | None = f"\\end{{{bare[1]}}}"
    else:
        closing = dict(_DELIMITERS[:2]).get(head)
        body += 1
    if closing is None or state.is_code_block(first):
        return False
    for line in range(body, last):
        text = state.src[state.bMarks[line] : state.eMarks[line]]
        if text.rstrip().endswith(closing):
            break
    else:
        return False
    if not silent:
        token = state.push("formula", "math", 0)
        token.block = True
        token.meta = {"block": True}
        content = state.getLines(first, line + 1, 0, False).strip()
        if not bare:
            content = content.removeprefix(head).removesuffix(closing)
        token.content = content
        token.map = [first, line + 1]
        state.line = line + 1
    return True


def _formula(self: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    token = tokens[index]
    display = "block" if token.meta["block"] else "inline"
    # Environments that the converter lacks, or numbers, by others that look the same.
    content = token.content.strip()
    if content.startswith("\\begin{eqnarray"):  # three columns, where the others have two
        content = re.sub(r"&((?:(?!\\\\)[^&])*)&", r"&\1", content)
    content = re.sub(r"\\(begin|end)\{(aligned|align|eqnarray)\*?\}", r"\\\1{align*}", content)
    content = re.sub(r"\\(begin|end)\{(gathered|gather|multline)\*?\}", r"\\\1{matrix}", content)
    try:
        text = latex2mathml.converter.convert(content, display=display)
        return _mathml(ElementTree.fromstring(text))
    except Exception:  # whatever a converter makes of other text
        return f"<code>{escape(token.content)}</code>"


def _mathml(element: ElementTree.Element) -> str:
    """Return ``element`` with only its harmless parts."""
    name = element.tag.rpartition("}")[2]
    inner = escape(element.text or "")
    for child in element:
        inner += _mathml(child)
        inner += escape(child.tail or "")
    if not _MATHML.fullmatch(name):
        return inner
    attributes = ""
    for key, value in element.attrib.items():
        if _MATHML_ATTRIBUTES.fullmatch(key):
            attributes += f' {key}="{escape(value)}"'
    return f"<{name}{attributes}>{inner}</{name}>"
