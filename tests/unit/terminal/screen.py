"""A screen of unlimited height for the output of rich."""

from __future__ import annotations

import io
import re

_CODE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b|[\r\n]|[^\x1b\r\n]+")


class Screen(io.StringIO):
    """Follows line ends, cursor movements up, erased lines and styles; ``n_erased`` counts rows
    with text that went.

    It has no width until `resize`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n_erased = 0
        self._rows = [""]
        self._styles = [""]
        self._row = 0
        self._column = 0
        self._style = ""
        self._width = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for found in _CODE.finditer(text):
            self._obey(found[0], found[1] or "", found[2] or "")
        return len(text)

    def rows(self) -> list[str]:
        """Return the rows above the cursor, without blanks at their ends."""
        assert not self._rows[self._row]
        return [row.rstrip() for row in self._rows[: self._row]]

    def resize(self, width: int) -> None:
        """Wrap rows that are longer, now and from now on; the cursor stays below what it was
        below.
        """
        self._width = width
        pieces = [
            [row[at : at + width] for at in range(0, len(row) or 1, width)] for row in self._rows
        ]
        self._row = sum(map(len, pieces[: self._row]))
        self._styles = [style for style, row in zip(self._styles, pieces, strict=True) for _ in row]
        self._rows = [piece for row in pieces for piece in row]

    def style(self, row: int) -> str:
        """Return the style in which ``row`` begins."""
        return self._styles[row]

    def _obey(self, text: str, numbers: str, letter: str) -> None:
        """Apply one piece of output: text, a line end, or the escape sequence of ``numbers`` and
        ``letter``.
        """
        if letter == "m":
            self._style = "" if numbers == "0" else numbers
        elif letter == "A":
            self._row -= int(numbers)
            assert self._row >= 0
        elif letter == "K":
            self.n_erased += bool(self._rows[self._row].strip())
            self._rows[self._row] = ""
            self._styles[self._row] = ""
        elif text == "\r":
            self._column = 0
        elif text == "\n":
            self._row = self._row + 1
            self._column = 0
            if self._row == len(self._rows):
                self._rows.append("")
                self._styles.append("")
        elif letter:
            assert numbers + letter in ("?25l", "?25h"), text
        else:
            assert text != "\x1b"
            assert self._column == len(self._rows[self._row]), "nothing is written over"
            if not self._column:
                self._styles[self._row] = self._style
            self._rows[self._row] += text
            self._column += len(text)
            if 0 < self._width < self._column:
                rest = self._rows[self._row][self._width :]
                self._rows[self._row] = self._rows[self._row][: self._width]
                self._obey("\n", "", "")
                self._obey(rest, "", "")
