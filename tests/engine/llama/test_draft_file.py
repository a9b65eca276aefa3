from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.engine.draft.draft_settings import DraftSettings
from pyctl.engine.llama.draft.draft_file import with_inferred_type
from pyctl.errors import ModelError


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("tiny-dense", "draft-simple"), ("tiny-hybrid-nextn", "draft-mtp"), ("tiny-hybrid-head", "draft-mtp")],
)
def test_a_draft_file_says_what_it_is_for(model_path: Callable[[str], Path], shape: str, expected: str) -> None:
    path = str(model_path(shape))
    assert with_inferred_type(DraftSettings(draft_path=path)).draft_types == (expected,)
    told = DraftSettings(("ngram-mod", "draft-simple", "ngram-mod"), draft_path=path)
    assert with_inferred_type(told).draft_types == ("ngram-mod", "draft-simple")


def test_without_a_file_nothing_is_inferred() -> None:
    assert with_inferred_type(DraftSettings()) == DraftSettings()
    assert with_inferred_type(DraftSettings(("draft-mtp",))).draft_types == ("draft-mtp",)


def test_a_draft_model_without_a_file_is_an_error_in_the_log_as_in_llama_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert with_inferred_type(DraftSettings(("draft-simple", "cache"))).draft_types == ("cache",)
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.ERROR, "--spec-type draft-simple needs a draft model: give --model-draft")
    ]


def test_a_draft_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text("no")
    for name in ("a.gguf", "missing.gguf"):
        with pytest.raises(ModelError, match=name):
            with_inferred_type(DraftSettings(draft_path=str(tmp_path / name)))
