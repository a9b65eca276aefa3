"""The first minute of the commands has no word that only developers use."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest

from pyctl.cache.saved_time import Saved
from pyctl.cli import USAGE, main
from pyctl.cli.startup_banner import cache_text, saved_text

DOCS = Path(__file__).resolve().parents[3] / "docs"
ORDINARY = {"value", "lock", "pin", "rows", "mark"}
"""Words of the developers' glossary that have their usual meaning on a screen."""


def words_of(page: str) -> set[str]:
    """Return the words that the first table of a glossary explains."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (table, *_) = re.findall(r"\| word \| meaning \|\n\|[-|]+\n((?:\|.*\n)+)", text)
    cells = (line.split("|")[1] for line in table.splitlines())
    return {word.strip() for cell in cells for word in cell.split(",")}


def private_words() -> set[str]:
    """Return the words of developers that the users' glossary lacks."""
    return words_of("internals/glossary.md") - words_of("glossary.md") - ORDINARY


def check_words(text: str) -> None:
    """Check that ``text`` has no private word."""
    found = [word for word in private_words() if re.search(rf"\b{re.escape(word)}s?\b", text)]
    assert found == []


def test_both_glossaries_are_read() -> None:
    assert {"snapshot", "live", "head", "state", "rows", "draft"} <= words_of("glossary.md")
    assert {"segment", "fingerprint", "boundary"} <= private_words()


@pytest.mark.parametrize(
    "command", [["serve"], ["chat"], ["launch"], ["bench"], ["doctor"], ["models"], ["verify"]]
)
def test_the_help_of_a_command_has_users_words(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):  # argparse ends so
        main([*command, "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: pyctl")
    check_words(text)


def test_the_list_of_commands_has_users_words() -> None:
    check_words(USAGE)


def test_a_start_shows_the_time_saved_today() -> None:
    assert saved_text(Saved()) == ""
    text = saved_text(Saved(seconds=23.4, tokens=13_887, requests=2))
    assert text == "about 23 s today, 13,887 tokens restored in 2 requests"
    check_words(text)
    check_words(cache_text(2**30, "/kv", []))
