"""Tables of README and docs are those of bench/results; each source, and each claim, says how to
repeat it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from bench.gpu.machine import describe
from bench.head import HEAD, MAX_AGE, ROOT, age, head
from tools.figures import (
    AGES,
    CLAIMS,
    FIGURES,
    MAX_DRIFT,
    RESULTS,
    Figure,
    check,
    is_stale,
    pages,
    too_old,
)

COMPLETE = {
    "commit": "written at abcdef01",
    "date": "2026-01-01",
    "machine": "a CPU",
    "command": "`a`",
    "weights": "none",
}


def test_all_tables_are_those_of_sources_that_name_their_origin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check() == []
    assert re.search(
        r"^replay\.md +63ae04c +(\d[\d,]* commits old|of unknown age)",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    shown = re.findall(
        r"<!-- figures: ([\w-]+) -->", "".join(page.read_text(encoding="utf-8") for page in pages())
    )
    assert sorted(shown) == sorted(FIGURES)


@pytest.mark.parametrize(
    ("change", "missing"),
    [*(({name: ""}, name) for name in HEAD), ({"commit": "the newest"}, "commit")],
)
def test_a_source_without_its_whole_head_is_refused(
    tmp_path: Path, change: dict[str, str], missing: str
) -> None:
    def plant(fields: dict[str, str]) -> Path:
        lines = [f"- {name}: {value}" for name, value in fields.items() if value]
        (tmp_path / "planted.md").write_text(
            "\n".join(["# Planted", "", *lines, "", f"| - {missing}: abcdef01 |"])
        )
        return tmp_path / "planted.md"

    assert head(plant(COMPLETE)) == COMPLETE
    with pytest.raises(ValueError, match=f"planted.md lacks its {missing}: write '- {missing}: "):
        head(plant(COMPLETE | change))


def test_a_table_that_the_engine_left_behind_fails_the_check() -> None:
    """A table may be shown until more than `MAX_AGE` commits changed the engine since one of its
    sources; an unknown age is no fault.
    """
    shown = {"first-token": FIGURES["first-token"], "models": FIGURES["models"]}
    assert too_old(shown, lambda commit: MAX_AGE) == []
    assert too_old(shown, lambda commit: None) == []
    (line,) = too_old(shown, lambda commit: MAX_AGE + 1)
    source = head(RESULTS / FIGURES["first-token"].sources[0])["commit"]
    assert line.startswith(
        f"first-token: 201 engine commits since {source}, at most 200: measure it"
    )


def test_a_caption_has_the_age_of_its_source() -> None:
    (caption, blank) = Figure(list, ("traces.md",)).caption()
    assert blank == ""
    source = head(RESULTS / "traces.md")
    described = f"{source['date']}, commit {source['commit']}"
    assert AGES.sub("", caption) == f"*None, simulated weights, AMD EPYC, {described}*"


def test_an_age_in_a_caption_may_be_a_little_behind() -> None:
    def page(n: int, cell: str = "1") -> str:
        return f"*AMD, commit 59f21c80 ({n} engine commits since)*\n\n| {cell} |\n"

    assert not is_stale(page(10), page(10 + MAX_DRIFT))
    assert is_stale(page(10), page(11 + MAX_DRIFT))
    assert is_stale(page(10), page(10, cell="2"))
    assert not is_stale(page(10), AGES.sub("", page(0)))


def test_scripts_write_the_whole_head() -> None:
    assert tuple(describe("random")) == HEAD


def test_ages_count_commits_and_need_no_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The age of a figure counts the commits since, and those of the engine apart, and marks old
    ones. A shallow clone and a source without git have an unknown age instead of an error.
    """

    def git(*arguments: str) -> str:
        command = ("git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments)
        return subprocess.check_output(command, cwd=tmp_path, text=True).strip()

    assert age("abcdef01", tmp_path) == "of unknown age"
    git("init", "-q")
    (tmp_path / "csrc").mkdir()
    commits = []
    for number, subject in enumerate(
        ("core: begin", "docs: change nothing", "core: name a thing", "core: end batches")
    ):
        (tmp_path / ("README" if subject.startswith("docs") else "csrc/a")).write_text(str(number))
        git("add", ".")
        git("commit", "-q", "-m", subject)
        commits.append(git("rev-parse", "HEAD"))
    assert [age(commit, tmp_path) for commit in commits[1:]] == [
        "2 commits old, 1 of them in the engine",
        "1 commits old, 1 of them in the engine",
        "0 commits old, 0 of them in the engine",
    ]
    monkeypatch.setattr("bench.head.MAX_AGE", 0)
    assert age(commits[1], tmp_path) == "2 commits old, 1 of them in the engine: OLD"
    assert age(commits[3], tmp_path) == "0 commits old, 0 of them in the engine"
    git("clone", "-q", "--depth", "1", f"file://{tmp_path}", "shallow")
    assert age(commits[0], tmp_path / "shallow") == "of unknown age"
    assert age(commits[3], tmp_path / "shallow") == "0 commits old, 0 of them in the engine"


@pytest.mark.parametrize(
    "claim", CLAIMS.read_text(encoding="utf-8").splitlines(), ids=lambda line: line.split("\t")[0]
)
def test_what_shows_a_claim_exists(claim: str) -> None:
    _, shown = claim.split("\t")
    if shown.startswith("tests/"):
        path, _, name = shown.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    elif shown.startswith("make "):
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{shown.removeprefix('make ')}:", makefile, re.MULTILINE)
    else:
        module = shown.removeprefix("python -m ").split()[0]
        assert importlib.util.find_spec(module) is not None
