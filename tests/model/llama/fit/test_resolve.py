"""Values that follow from the files of a model: sequences, the types of drafts, the split."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.errors import ModelError
from pyctl.llama.fit.resolve import resolve
from pyctl.llama.library import extension
from pyctl.llama.library.devices import Device
from pyctl.llama.settings import resolved as resolved_module
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.resolved import CPU_UBATCH, EXPERTS_UBATCH, GPU_UBATCH


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


GPU = Device("CUDA0", "a GPU", True, 0, "CUDA0", 0, 2**34, 2**34)


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("tiny-moe", {}, EXPERTS_UBATCH),
        ("tiny-dense", {}, GPU_UBATCH),
        ("tiny-moe", {"n_ubatch": 640}, 640),
        ("tiny-moe", {"n_batch": 900}, 900),
    ],
)
def test_a_mixture_of_experts_has_larger_batches_on_a_gpu(
    model_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fields: dict[str, int],
    expected: int,
) -> None:
    settings = ModelSettings(path=str(model_path(name)), **fields)
    monkeypatch.setattr(resolved_module, "devices", lambda: (GPU,))
    assert resolve(settings).model.n_ubatch == expected


def test_without_a_gpu_experts_have_no_larger_batches(model_path: Callable[[str], Path]) -> None:
    resolved = resolve(ModelSettings(path=str(model_path("tiny-moe"))))
    assert resolved.model.n_ubatch == CPU_UBATCH


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
