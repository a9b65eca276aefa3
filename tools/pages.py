"""Prints the words of each page of docs by its job, as README's table of pages has them.

    python -m tools.pages

The number of words of all pages is bounded by `MAX_WORDS`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["MAX_WORDS", "count_words", "jobs", "main", "table"]

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

MAX_WORDS = 26_000
"""Words of all pages of docs."""

DEVELOP = "develop"
"""The job of the pages below docs/internals, which README does not list one by one."""


def count_words(text: str) -> int:
    """Return the number of words with a letter or a digit, those of tables and code included."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


def jobs(readme: str) -> Iterator[tuple[str, str]]:
    """Yield (job, page) for each page of docs that the last table of ``readme`` lists, the page
    below docs.
    """
    rows = readme.rpartition("| to | read |")[2]
    for job, cell in re.findall(r"^\| ([\w ]+) \| (.+) \|$", rows, re.MULTILINE):
        for page in re.findall(r"\]\(docs/([\w/.-]+\.md)[^)]*\)", cell):
            yield job, page


def table(readme: str, docs: Path = DOCS) -> list[tuple[str, str, int]]:
    """Return (job, page, words) of each page of ``docs``, by job; ValueError if a page that is not
    for developers has no job, or two.
    """
    listed = [(job, page) for job, page in jobs(readme) if "/" not in page]
    for path in docs.glob("*.md"):
        if [page for _, page in listed].count(path.name) != 1:
            raise ValueError(f"README's table of pages has to list {path.name} once")
    inside = sorted((docs / "internals").rglob("*.md"))
    listed += [(DEVELOP, str(path.relative_to(docs))) for path in inside]
    return [
        (job, page, count_words((docs / page).read_text(encoding="utf-8"))) for job, page in listed
    ]


def main(argv: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    found = table((ROOT / "README.md").read_text(encoding="utf-8"))
    for job in dict.fromkeys(job for job, _, _ in found):
        pages = [(page, n) for each, page, n in found if each == job]
        print(f"{job}: {sum(n for _, n in pages):,} words, {len(pages)} pages")
        for page, n in pages:
            print(f"  {n:6,}  {page}")
    print(f"all: {sum(n for _, _, n in found):,} of at most {MAX_WORDS:,} words")


if __name__ == "__main__":
    main()
