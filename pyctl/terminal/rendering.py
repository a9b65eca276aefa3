"""Replies on a terminal: Markdown, rendered and wrapped at words while it grows.

A text is cut into blocks, each rendered on its own. A complete block is printed once. Of the open block, the last rows
stand in a region that is drawn again; rows above it are printed. Drawing takes at most a fixed share of the time, and
the size of a block is bounded.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.control import Control
from rich.markdown import CodeBlock, Heading, Markdown
from rich.segment import ControlType, Segment, Segments
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from pyctl.limit import limit

__all__ = ["THEME", "Block", "GrowingText", "MarkdownBlocks", "formatted"]

_MOST_BLOCK = limit(
    4096, "a block of Markdown in a reply in a terminal", "rendered in several parts", "reply", "characters"
)

_PAUSE = 9.0
"""Between two drawings, in times of the first one's duration."""

_MOST_NESTED = 12
"""Levels of quotes, lists and their items within each other; a block with more is not rendered."""

_TABLE_HEAD = 2
"""Lines before the rows of a table."""

_LIST = re.compile(r" {0,3}(?:[-*+]|[0-9]{1,9}[.)])(?:\s|$)")
_HEADING = re.compile(r" {0,3}#{1,6}(?:\s|$)")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")

THEME = Theme(
    {
        "markdown.code": "cyan",
        "markdown.h1": "bold underline",
        "markdown.h2": "bold",
        "markdown.h3": "bold",
        "markdown.h4": "bold italic",
        "markdown.h5": "italic",
        "markdown.h6": "italic",
        "markdown.item.bullet": "bold",
        "markdown.item.number": "bold",
        "markdown.block_quote": "italic",
        "markdown.link": "underline",
        "markdown.link_url": "dim",
        "markdown.table.border": "dim",
        "markdown.table.header": "bold",
    }
)
"""Styles without a background, readable on light and dark terminals."""


@dataclass(frozen=True)
class Block:
    """A part of a text that is rendered on its own, ``gap`` empty rows below the block before."""

    text: str
    gap: int = 1


class MarkdownBlocks:
    """Markdown, cut where its meaning does not reach across: between paragraphs, lists, tables and fences.

    ``gap`` are the empty rows above the open block.
    """

    def __init__(self) -> None:
        self.gap = 1
        self._lines: list[str] = []
        self._size = 0
        self._rest = ""
        self._fence = ""
        self._follows_blank = False
        self._is_list = False
        self._n_head = 0  # lines that each part of the block begins with

    @property
    def is_final(self) -> bool:
        """Whether more text changes only the last rows of the open block."""
        return self._n_head != _TABLE_HEAD  # the columns of a table depend on all of its rows

    def feed(self, text: str) -> list[Block]:
        """Add ``text``; return the blocks that it completes."""
        *lines, self._rest = (self._rest + text).split("\n")
        made: list[Block] = []
        for line in lines:
            self._take(line, made)
        if self._size + len(self._rest) >= _MOST_BLOCK:
            if len(self._rest) >= _MOST_BLOCK // 2:  # no line end is near
                self._add(self._rest)
                self._rest = ""
            if len(self._lines) > self._n_head:
                self._cut(made)
        return made

    def finish(self) -> list[Block]:
        """End the text; return the rest."""
        made: list[Block] = []
        if self._rest:
            self._take(self._rest, made)
            self._rest = ""
        self._complete(made)
        return made

    def open(self) -> str:
        """The source of the block that is not complete."""
        return "\n".join([*self._lines, self._rest])

    def _take(self, line: str, made: list[Block]) -> None:
        """One line without its end."""
        if self._fence:
            self._take_code(line, made)
            return
        if not line.strip():
            self._follows_blank = bool(self._lines)
            if self._lines:
                self._add(line)
            return
        inside = self._is_list and line[0] in " \t"
        is_item = self._is_list and not inside and bool(_LIST.match(line))
        if self._follows_blank and not (inside or is_item):
            self._complete(made)
        self._follows_blank = False
        if found := _FENCE.match(line):
            if not inside:
                self._complete(made)
                self._n_head = 1
            self._fence = found[1]
            self._add(line)
        elif _HEADING.match(line) and not inside:
            self._complete(made)
            self._add(line)
            self._complete(made)
        else:
            self._is_list = self._is_list if self._lines else bool(_LIST.match(line))
            self._add(line)
            if _is_ruling(line) and len(self._lines) > 1 and "|" in self._lines[-2] and self._n_head == 0:
                self._begin_table(made)

    def _take_code(self, line: str, made: list[Block]) -> None:
        self._add(line)
        if len(line.strip()) >= len(self._fence) and not line.strip().strip(self._fence[0]):
            self._fence = ""
            if self._n_head:
                self._complete(made)

    def _begin_table(self, made: list[Block]) -> None:
        """The last two lines are the head of a table."""
        head = self._lines[-_TABLE_HEAD:]
        self._lines = self._lines[:-_TABLE_HEAD]
        self._complete(made)
        for line in head:
            self._add(line)
        self._n_head = _TABLE_HEAD

    def _add(self, line: str) -> None:
        self._lines.append(line)
        self._size += len(line) + 1

    def _cut(self, made: list[Block]) -> None:
        """End a part of the open block; the next part has the same head."""
        head, is_list = self._lines[: self._n_head], self._is_list
        n_empty = self._end(made)
        self.gap = n_empty if head else 0
        self._is_list = is_list
        for line in head:
            self._add(line)
        self._n_head = len(head)

    def _complete(self, made: list[Block]) -> None:
        self._end(made)
        self.gap = 1

    def _end(self, made: list[Block]) -> int:
        """End the open block; return how many empty lines were at its end."""
        n = len(self._lines)
        while self._lines and not self._lines[-1].strip():
            self._lines.pop()
        n_empty, is_part = n - len(self._lines), len(self._lines) > self._n_head
        if is_part or (self._lines and self.gap == 1):
            made.append(Block("\n".join(self._lines), self.gap))
        self._lines, self._size, self._n_head = [], 0, 0
        self._follows_blank = self._is_list = False
        return n_empty


def _is_ruling(line: str) -> bool:
    """Whether ``line`` separates the head of a table from its rows."""
    return "|" in line and "-" in line and not line.strip("|-: \t")


class _LeftHeading(Heading):
    LEVEL_ALIGN: ClassVar = dict.fromkeys(Heading.LEVEL_ALIGN, "left")


class _Code(CodeBlock):
    """Indented, in the terminal's own colours."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(str(self.text).rstrip(), self.lexer_name, theme="ansi_dark", word_wrap=True, padding=(0, 2))


class _Formatted(Markdown):
    """Markdown without HTML, images and definitions, which rich would leave out: they are shown as they are.

    A line end is kept, as a page of a chat keeps it. Addresses are shown beside the text of a link.
    """

    elements: ClassVar = {**Markdown.elements, "heading_open": _LeftHeading, "fence": _Code, "code_block": _Code}

    def __init__(self, text: str, tokens: list[Token]) -> None:
        super().__init__("", hyperlinks=False)
        self.markup, self.parsed = text, tokens
        for token in tokens:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": _MOST_NESTED})
    return parser.enable(["strikethrough", "table"]).disable(["reference", "image"])


def formatted(text: str) -> RenderableType:
    """``text`` rendered as Markdown; as it is where it is nested too deeply."""
    tokens = _parser().parse(text)
    is_deep = any(token.level >= _MOST_NESTED - 1 for token in tokens)  # the parser drops what is deeper
    return Text(text) if is_deep else _Formatted(text, tokens)


class GrowingText:
    """Markdown that grows at the end of ``console``, a terminal; ``render`` makes rows of each of its blocks."""

    def __init__(
        self,
        console: Console,
        render: Callable[[str], RenderableType] = formatted,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._console = console
        self._blocks = MarkdownBlocks()
        self._render = render
        self._options = console.options
        self._n_printed = 0  # rows of the open block
        self._clock = clock
        self._next_draw = clock()
        self._is_empty = True
        self._region: list[list[Segment]] = []  # rows that are drawn again
        console.show_cursor(False)

    def feed(self, text: str) -> None:
        """Show more."""
        for block in self._blocks.feed(text):
            self._complete(block)
        if (begun := self._clock()) >= self._next_draw:
            self._draw(self._blocks.open())
            ended = self._clock()
            self._next_draw = ended + _PAUSE * (ended - begun)

    def finish(self) -> None:
        """Show the rest, and end the region."""
        for block in self._blocks.finish():
            self._complete(block)
        self._replace([], [])
        self._console.show_cursor(True)

    def _draw(self, source: str) -> None:
        """Draw the last rows of the open block again."""
        rows = self._rows(source, self._blocks.gap) if source.strip() else []
        n_most = max(self._console.height // 2, 1)
        n_above = max(self._n_printed, len(rows) - n_most) if self._blocks.is_final else self._n_printed
        shown = rows[n_above:][-n_most:]
        self._replace(rows[self._n_printed : n_above], shown)
        self._n_printed = n_above

    def _complete(self, block: Block) -> None:
        self._replace(self._rows(block.text, block.gap)[self._n_printed :], [])
        self._n_printed = 0
        self._is_empty = False

    def _replace(self, rows: list[list[Segment]], region: list[list[Segment]]) -> None:
        """Erase the region, print ``rows`` and draw another ``region``.

        A terminal that became narrower has wrapped rows of the width before, and wraps those that still come.
        """
        width = self._console.width
        n_rows = sum(max(-(-Segment.get_line_length(row) // width), 1) for row in self._region)
        self._region = region
        segments = [segment for row in (*rows, *region) for segment in (*row, Segment.line())]
        with self._console:  # one write
            self._console.control(Control(*[(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)] * n_rows))
            self._console.print(Segments(segments), end="", crop=False)

    def _rows(self, source: str, gap: int) -> list[list[Segment]]:
        if not self._n_printed:  # rows of one block have one width
            self._options = self._console.options
        rows = self._console.render_lines(self._render(source), self._options, pad=False)
        rows = [_trimmed(row) for row in rows]
        if source.strip():  # rich puts empty rows around lists and tables
            while rows and not rows[0]:
                del rows[0]
            while rows and not rows[-1]:
                del rows[-1]
        return rows if self._is_empty else [*([] for _ in range(gap)), *rows]


def _trimmed(row: list[Segment]) -> list[Segment]:
    """Without the blanks at the end, with which rich fills rows: a copy from the terminal would have them."""
    row = [*row]
    while row and not row[-1].text.rstrip():
        row.pop()
    if row:
        row[-1] = Segment(row[-1].text.rstrip(), row[-1].style)
    return row
