"""Pages of docs are counted by the jobs that README's table gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.pages import ROOT, count_words, jobs, main, table

README = """# A
| to | read |
|---|---|
| begin | [a](docs/a.md), [b](docs/b.md#start) |
| develop | [architecture](docs/internals/c.md), [changes](CHANGELOG.md) |
"""


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "internals").mkdir()
    (tmp_path / "a.md").write_text("# One\n\n| two | - | `--three` |\n")
    (tmp_path / "b.md").write_text("four")
    (tmp_path / "internals" / "c.md").write_text("five six")
    return tmp_path


def test_words_have_a_letter_or_a_digit() -> None:
    assert count_words("# One, 2 | - `--three` |---|\n") == 3


def test_a_page_has_the_job_of_its_row() -> None:
    assert list(jobs(README)) == [
        ("begin", "a.md"),
        ("begin", "b.md"),
        ("develop", "internals/c.md"),
    ]


def test_all_pages_are_counted(docs: Path) -> None:
    assert table(README, docs) == [
        ("begin", "a.md", 3),
        ("begin", "b.md", 1),
        ("develop", "internals/c.md", 2),
    ]


@pytest.mark.parametrize(
    "links", ["[a](docs/a.md)", "[b](docs/b.md), [b](docs/b.md), [a](docs/a.md)"]
)
def test_a_page_without_a_job_or_with_two_is_refused(docs: Path, links: str) -> None:
    with pytest.raises(ValueError, match=r"has to list b\.md once"):
        table(f"| to | read |\n|---|---|\n| begin | {links} |\n", docs)


def test_the_report_has_each_page_of_this_repository(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[1] for line in lines if line.startswith("  ")]
    docs = ROOT / "docs"
    assert sorted(names) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))
