"""The benchmark of the rule for loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.loops import Corpus, detections, false_positives, record
from pyctl.prompt import as_tokens

TEXT = as_tokens(np.random.default_rng(1).integers(0, 50_000, 2000))


def test_a_file_that_repeats_itself_is_a_false_positive() -> None:
    table = as_tokens([*range(20)] * 40)
    corpus = Corpus("tables", (), ())
    row, worst = false_positives(corpus, [(Path("plain"), TEXT), (Path("table"), table)])
    assert row == ["tables", 2, TEXT.size + table.size, 1, 1, 1, 0]
    assert worst == [["tables", "table", 780, 20]]


def test_the_longest_run_of_each_period_is_recorded() -> None:
    runs = record(as_tokens([*range(1000), *[7] * 150, *range(1000)]))
    assert runs.has_loop(149, 3)
    assert not runs.has_loop(150, 3)


def test_every_generated_loop_is_detected() -> None:
    rows = [*detections([TEXT])]
    assert all(row[1] == row[2] for row in rows)
    assert rows[0][3] == 400


def test_the_files_of_a_corpus_are_spread_over_all(tmp_path: Path) -> None:
    for number in range(400):
        (tmp_path / f"{number:03}.txt").write_text("x")
    (tmp_path / "empty.txt").touch()
    files = Corpus("texts", (tmp_path,), ("*.txt",)).files()
    assert len(files) == 150
    assert files[1].name == "002.txt"
