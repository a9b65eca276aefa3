"""Values that follow from the files of a model: sequences, the types of drafts, the split."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.errors import ModelError
from pyctl.llama.fit.resolve import resolve
from pyctl.llama.library import extension
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings


@pytest.mark.parametrize(
    ("name", "n_seqs"),
    [
        ("tiny-llama", 4),
        ("tiny-deepseek32", 1),
        ("tiny-deepseek4", 4),  # its indexer chooses among the rows of one sequence
    ],
)
def test_an_indexer_over_all_rows_serves_one_request_at_a_time(
    model_path: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
    name: str,
    n_seqs: int,
) -> None:
    """An indexer that chooses among the rows of all sequences would make a reply depend on the
    other requests; the log gives the reason for the single sequence.
    """
    resolved = resolve(ModelSettings(path=str(model_path(name)), n_seqs=4))
    assert resolved.model.n_seqs == n_seqs
    reasons = [text for text in caplog.messages if text.startswith("one request at a time")]
    assert len(reasons) == (n_seqs == 1)


def test_without_the_extension_there_is_one_sequence(
    model_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without the extension rows keep the cells that other requests left them, which shows in the
    bits; the line about the missing extension is logged elsewhere.
    """
    monkeypatch.setattr(extension, "core", None)
    for n_seqs in (4, 1):
        resolved = resolve(ModelSettings(path=str(model_path("tiny-llama")), n_seqs=n_seqs))
        assert resolved.model.n_seqs == 1
    assert not caplog.records


def test_the_draft_file_decides_how_it_drafts(model_path: Callable[[str], Path]) -> None:
    model = ModelSettings(path=str(model_path("tiny-hybrid")))
    file = str(model_path("tiny-hybrid-head"))
    assert resolve(model, DraftSettings(draft_path=file)).drafts.draft_types == ("draft-mtp",)
    given = DraftSettings(("draft-mtp",), draft_path=file)
    assert resolve(model, given).drafts == given
    assert resolve(model).drafts.draft_types == ()
    with pytest.raises(ModelError, match="for --spec-type draft-mtp, not for draft-eagle3"):
        resolve(model, DraftSettings(("draft-eagle3",), draft_path=file))


def test_given_values_stay_in_silence(
    model_path: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    path = str(model_path("tiny-dense"))
    resolved = resolve(ModelSettings(path=path, n_seqs=3, split_mode="layer"))
    assert resolved.model.n_seqs == 3
    assert resolved.model.split_mode == "layer"
    assert not caplog.records


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"m\.gguf"):
        resolve(ModelSettings(path=str(tmp_path / "m.gguf")))
