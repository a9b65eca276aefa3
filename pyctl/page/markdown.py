"""Markdown to HTML that a page can show as it is: no script, no request, no style of its own.

Every text may be hostile, and neither parsing nor highlighting is bounded in time. So a server does not call this; it
uses a `MarkdownProcess`, which can be killed.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from html import escape
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

__all__ = ["html_of"]

_MOST_NESTED = 32
"""Quotes and lists within each other; what is deeper is text."""

_DELIMITERS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))

_MATHML = re.compile(
    "math|mrow|mi|mn|mo|ms|mtext|mspace|msup|msub|msubsup|mfrac|msqrt|mroot|mover|munder|munderover|mtable|mtr|mtd"
    "|mstyle|mpadded|mphantom|menclose|mmultiscripts|mprescripts|none"
)
_MATHML_ATTRIBUTES = re.compile(
    "display|mathvariant|stretchy|fence|form|largeop|movablelimits|accent|accentunder|lspace|rspace|minsize|maxsize"
    "|columnalign|rowspacing|columnspacing|columnlines|rowlines|displaystyle|scriptlevel|linethickness|notation"
    "|separator|width|height|depth|symmetric"
)


def html_of(text: str) -> str:
    """``text`` as HTML; any text is Markdown of some kind."""
    return str(_parser().render(text))


@cache
def _parser() -> MarkdownIt:
    options = {"html": False, "linkify": False, "breaks": True, "maxNesting": _MOST_NESTED}
    parser = MarkdownIt("js-default", options)
    parser.inline.ruler.before("escape", "formula", _inline_formula)
    parser.block.ruler.before("fence", "formulas", _block_formula, {"alt": ["paragraph", "list", "blockquote"]})
    for name, rule in (("fence", _fence), ("code_block", _fence), ("image", _image), ("link_open", _link)):
        parser.add_render_rule(name, rule)
    parser.add_render_rule("formula", _formula)
    parser.add_render_rule("th_open", _cell)
    parser.add_render_rule("td_open", _cell)
    parser.add_render_rule("table_open", lambda *_: '<div class="table"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return parser


def _fence(self: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    """A block of code with its language and a button that a page makes copy it."""
    token = tokens[index]
    language = token.info.strip().split(maxsplit=1)[0] if token.info.strip() else ""
    code = token.content
    body = ""
    if language:
        with suppress(ClassNotFound):
            body = highlight(code, get_lexer_by_name(language, stripnl=False), HtmlFormatter(nowrap=True))
    head = f'<span>{escape(language[:32] or "text")}</span><button type="button" class="copy">Copy</button>'
    lines = f'<pre tabindex="0"><code>{body or escape(code)}</code></pre>'
    return f'<div class="code"><div class="code-head">{head}</div>{lines}</div>\n'


def _image(self: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    """A picture that is in the text itself; of others only a link, so that nothing is fetched by reading."""
    token = tokens[index]
    source = str(token.attrs.get("src", ""))
    said = escape(self.renderInlineAsText(token.children or [], options, env) or "picture")
    if source.startswith("data:image/"):
        return f'<img src="{escape(source)}" alt="{said}">'
    return f'<a href="{escape(source)}" target="_blank" rel="noopener noreferrer nofollow">{said}</a>'


def _link(self: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    token = tokens[index]
    token.attrs = {name: value for name, value in token.attrs.items() if name in ("href", "title")}
    token.attrs |= {"target": "_blank", "rel": "noopener noreferrer nofollow"}
    return self.renderToken(tokens, index, options, env)


def _cell(self: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    """A cell of a table; how it is aligned is a class, since the page's policy lets no element have a style."""
    token = tokens[index]
    side = str(token.attrs.get("style", "")).partition(":")[2]
    token.attrs = {"class": side} if side in ("left", "right", "center") else {}
    return self.renderToken(tokens, index, options, env)


# -- formulas --------------------------------------------------------------------------------------------------------


def _inline_formula(state: StateInline, silent: bool) -> bool:
    text, start = state.src, state.pos
    opening, closing = next((each for each in _DELIMITERS if text.startswith(each[0], start)), ("", ""))
    if not opening:
        return False
    first = start + len(opening)
    last = text.find(closing, first, state.posMax)
    if last <= first:
        return False
    if opening == "$" and not _is_formula(text, first, last):
        return False
    if not silent:
        token = state.push("formula", "math", 0)
        token.content = text[first:last]
        token.meta = {"block": opening in ("$$", "\\[")}
    state.pos = last + len(closing)
    return True


def _is_formula(text: str, first: int, last: int) -> bool:
    """Whether what is between two dollars is no amount of money: it touches both, and no digit follows."""
    after = text[last + 1 : last + 2]
    return not (text[first].isspace() or text[last - 1].isspace() or after.isdigit() or "\n\n" in text[first:last])


def _block_formula(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    start, end = state.bMarks[first] + state.tShift[first], state.eMarks[first]
    if state.is_code_block(first):
        return False
    opening, closing = next((each for each in _DELIMITERS[:2] if state.src.startswith(each[0], start)), ("", ""))
    if not opening or state.src[start:end].strip() != opening:
        return False
    for line in range(first + 1, last):
        text = state.src[state.bMarks[line] : state.eMarks[line]].strip()
        if text == closing:
            break
    else:
        return False
    if not silent:
        token = state.push("formula", "math", 0)
        token.block, token.meta = True, {"block": True}
        token.content = state.getLines(first + 1, line, 0, False)
        token.map = [first, line + 1]
        state.line = line + 1
    return True


def _formula(self: RendererHTML, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    token = tokens[index]
    display = "block" if token.meta["block"] else "inline"
    try:
        tree = ElementTree.fromstring(latex2mathml.converter.convert(token.content.strip(), display=display))
        return _mathml(tree)
    except Exception:  # whatever a converter makes of what is no formula
        return f"<code>{escape(token.content)}</code>"


def _mathml(element: ElementTree.Element) -> str:
    """``element`` with what is known to be harmless of it."""
    name = element.tag.rpartition("}")[2]
    inner = escape(element.text or "") + "".join(_mathml(child) + escape(child.tail or "") for child in element)
    if not _MATHML.fullmatch(name):
        return inner
    known = {key: value for key, value in element.attrib.items() if _MATHML_ATTRIBUTES.fullmatch(key)}
    attributes = "".join(f' {key}="{escape(value)}"' for key, value in known.items())
    return f"<{name}{attributes}>{inner}</{name}>"
