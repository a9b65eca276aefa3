"""Limits about the lines of a reply."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pyctl.engine.stream import LineLimits


def fed(lines: LineLimits, pieces: Sequence[str], late_from: int = 99) -> str:
    text = ""
    for number, piece in enumerate(pieces):
        text += lines.feed(piece, number >= late_from)
        if lines.ended:
            break
    return text


@pytest.mark.parametrize(
    ("n_indent", "text", "left"),
    [
        (2, "a\n  b\n\tc", "a\n  b\n\t"),
        (2, "a\n  b\n \tc\nd", "a\n  b\n \tc\n"),
        (1, "no line", "no line"),
        (1, "a\n\n\n b\nc", "a\n\n\n b\n"),
        (0, "a\nb", "a\nb"),
    ],
)
def test_a_line_with_too_few_blanks_ends_the_reply(n_indent: int, text: str, left: str) -> None:
    for pieces in ([text], list(text)):
        lines = LineLimits(n_indent)
        assert fed(lines, pieces) == left
        assert lines.ended == (left != text)


def test_the_time_ends_the_reply_with_a_line() -> None:
    pieces = ["a\n", "b", "c", "d\n", "e\n"]
    assert fed(LineLimits(0), pieces) == "a\nbcd\ne\n"
    assert fed(LineLimits(0), pieces, late_from=1) == "a\nbcd\n"
