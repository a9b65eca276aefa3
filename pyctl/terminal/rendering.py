"""Replies on a terminal: Markdown, rendered and wrapped at words while it grows.

A text is cut into blocks, each rendered on its own. A complete block is printed once. Of the open
block, the last rows stand in a region that is drawn again; rows above it are printed. Drawing takes
at most a fixed share of the time, and the size of a block is bounded.
"""

from __future__ import annotations

import itertools
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

from pyctl.settings.limit import limit

__all__ = ["THEME", "Block", "GrowingText", "MarkdownBlocks", "formatted"]

_MAX_BLOCK = limit(
    4096,
    "a block of Markdown in a reply in a terminal",
    "rendered in several parts",
    "reply",
    "characters",
)

_PAUSE = 9.0
"""The time between two drawings, in times of the first one's duration."""

_MAX_NESTED = 12
"""Levels of quotes, lists and their items within each other; a block with more is not rendered."""

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
    """The blocks of Markdown, cut where the parser starts another block at the outermost level.

    ``gap`` are the empty rows above the open block; it ``is_final`` if more text changes only its
    last rows.
    """

    def __init__(self, max_block: int = _MAX_BLOCK) -> None:
        """Start with no text; a block of ``max_block`` characters is cut."""
        self._max_block = max_block
        self.gap = 1
        self.is_final = True
        self._lines: list[str] = []
        self._rest = ""
        self._n_head = 0  # lines that each part of the open block starts with
        self._n_repeated = 0  # of them stand in a part before

    def feed(self, text: str) -> list[Block]:
        """Add ``text``; return the blocks that it completes."""
        *lines, self._rest = (self._rest + text).split("\n")
        made: list[Block] = []
        if lines:
            self._lines += lines
            self._split_blocks(made)
        if len(self.open()) >= self._max_block:
            self._cut(made)
        return made

    def finish(self) -> list[Block]:
        """End the text; return the rest."""
        made = self.feed("\n")
        self._make(self._lines, made)
        return made

    def open(self) -> str:
        """Return the source of the block that is not complete."""
        return "\n".join([*self._lines, self._rest])

    def _split_blocks(self, made: list[Block]) -> None:
        tokens = _parser(inline=False).parse("\n".join(self._lines))
        outermost = [token for token in tokens if token.map and token.level == 0]
        starts = [token.map[0] for token in outermost if token.map]
        for start, end in itertools.pairwise(starts):
            self._make(self._lines[start:end], made)
        last = outermost[-1] if outermost else Token("", "", 0)
        last_start = starts[-1] if starts else len(self._lines) - 1
        self._lines = self._lines[last_start:]
        is_table = last.type == "table_open"
        self.is_final = not is_table  # the columns of a table depend on all of its rows
        self._n_head = 0
        if is_table:
            self._n_head = 2  # the titles and the line below them
        elif last.type == "fence" and not self._ends_fence(last.markup):
            self._n_head = 1

    def _ends_fence(self, markup: str) -> bool:
        """Return whether the last line of the open block closes its fence of ``markup``."""
        if len(self._lines) < 2:
            return False
        closing = self._lines[-1].strip()
        is_other_text = closing.strip(markup[:1])
        return len(closing) >= len(markup) and not is_other_text

    def _cut(self, made: list[Block]) -> None:
        """End a part of the open block; the next part has the same head."""
        if len(self._rest) >= self._max_block // 2:  # no line end is near
            self._lines.append(self._rest)
            self._rest = ""
        if len(self._lines) > self._n_head:
            head = self._lines[: self._n_head]
            n_empty = self._make(self._lines, made)
            self._lines = head
            self._n_repeated = len(head)
            self.gap = n_empty if head else 0

    def _make(self, lines: list[str], made: list[Block]) -> int:
        """End the block of ``lines``, none if they are only a repeated head; return the number of
        empty ones at its end.
        """
        n = len(lines)
        while lines and not lines[-1].strip():
            lines.pop()
        if len(lines) > self._n_repeated:
            made.append(Block("\n".join(lines), self.gap))
        self.gap = 1
        self._n_repeated = 0
        return n - len(lines)


class _LeftHeading(Heading):
    LEVEL_ALIGN: ClassVar = dict.fromkeys(Heading.LEVEL_ALIGN, "left")


class _Code(CodeBlock):
    """A block of code, indented, in the terminal's own colours."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(
            str(self.text).rstrip(),
            self.lexer_name,
            theme="ansi_dark",
            word_wrap=True,
            padding=(0, 2),
        )


class _Formatted(Markdown):
    """A rendering of Markdown without HTML, images and definitions, which rich would leave out:
    they are shown as text.

    A line end is kept, as a page of a chat keeps it. Addresses are shown next to the text of a
    link.
    """

    elements: ClassVar = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, text: str, tokens: list[Token]) -> None:
        super().__init__("", hyperlinks=False)
        self.markup = text
        self.parsed = tokens
        for token in tokens:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


@cache
def _parser(*, inline: bool = True) -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": _MAX_NESTED})
    return parser.enable(["strikethrough", "table"]).disable(
        ["reference", "image", *(() if inline else ("inline",))]
    )


def formatted(text: str) -> RenderableType:
    """Return ``text`` rendered as Markdown; unchanged if it is nested too deeply."""
    tokens = _parser().parse(text)
    is_deep = any(
        token.level >= _MAX_NESTED - 1 for token in tokens
    )  # the parser drops deeper ones
    return Text(text) if is_deep else _Formatted(text, tokens)


class GrowingText:
    """A region of Markdown at the end of ``console``, a terminal. ``render`` makes rows of a block;
    ``clock`` gives seconds.
    """

    def __init__(
        self,
        console: Console,
        render: Callable[[str], RenderableType] = formatted,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._console = console
        self._blocks = MarkdownBlocks()
        self._render = render
        self._pending = ""  # since the last drawing
        self._options = console.options
        self._n_printed = 0  # rows of the open block
        self._clock = clock
        self._next_draw = clock()
        self._is_empty = True
        self._region: list[list[Segment]] = []  # rows that are drawn again
        console.show_cursor(False)

    def feed(self, text: str) -> None:
        """Show more."""
        self._pending += text
        if (now := self._clock()) >= self._next_draw or len(self._pending) >= _MAX_BLOCK:
            for block in self._blocks.feed(self._pending):
                self._complete(block)
            self._pending = ""
            self._draw()
            ended = self._clock()
            self._next_draw = ended + _PAUSE * (ended - now)

    def finish(self) -> None:
        """Show the rest, and end the region."""
        for block in (*self._blocks.feed(self._pending), *self._blocks.finish()):
            self._complete(block)
        self._replace([], [])
        self._console.show_cursor(True)

    def _draw(self) -> None:
        """Draw the last rows of the open block again."""
        source = self._blocks.open()
        rows = self._rows(source, self._blocks.gap) if source.strip() else []
        n_max = max(self._console.height // 2, 1)
        n_above = (
            max(self._n_printed, len(rows) - n_max) if self._blocks.is_final else self._n_printed
        )
        shown = rows[n_above:][-n_max:]
        self._replace(rows[self._n_printed : n_above], shown)
        self._n_printed = n_above

    def _complete(self, block: Block) -> None:
        self._replace(self._rows(block.text, block.gap)[self._n_printed :], [])
        self._n_printed = 0
        self._is_empty = False

    def _replace(self, rows: list[list[Segment]], region: list[list[Segment]]) -> None:
        """Erase the region, print ``rows`` and draw another ``region``.

        A terminal that became narrower has wrapped rows of the width before, and wraps those that
        still come.
        """
        width = self._console.width
        n_rows = sum(max(-(-Segment.get_line_length(row) // width), 1) for row in self._region)
        self._region = region
        segments = [segment for row in (*rows, *region) for segment in (*row, Segment.line())]
        with self._console:  # one write
            self._console.control(
                Control(*[(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)] * n_rows)
            )
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
    """Drop the blanks at the end, with which rich fills rows: a copy from the terminal would have
    them.
    """
    row = [*row]
    while row and not row[-1].text.rstrip():
        row.pop()
    if row:
        row[-1] = Segment(row[-1].text.rstrip(), row[-1].style)
    return row
