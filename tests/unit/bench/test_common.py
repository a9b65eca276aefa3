"""Helpers of the benchmarks: pages of several tables."""

from __future__ import annotations

from pathlib import Path

from bench.common import show


def test_a_page_has_one_head_and_all_of_its_tables(tmp_path: Path) -> None:
    keep = str(tmp_path / "page")
    show("First", ["a", "b"], [[1, 2]], keep=keep, notes=["A note."])
    show("Second", ["c"], [[3]], keep=keep, is_first=False)
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page.count("- commit: ") == 1
    assert page.startswith("# First\n\n- commit: ")
    first = "- A note.\n\n| a | b |\n|---:|---:|\n| 1 | 2 |\n"
    assert page.endswith(f"{first}\n## Second\n\n| c |\n|---:|\n| 3 |\n")


def test_a_first_table_replaces_the_page(tmp_path: Path) -> None:
    for number in (1, 2):
        show("Only", ["a"], [[number]], keep=str(tmp_path / "page"))
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page.endswith("| 2 |\n")
    assert "| 1 |" not in page
