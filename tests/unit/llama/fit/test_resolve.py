"""Values that follow from a model's files: the sequences side by side, and the type of drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from pyctl.errors import ModelError
from pyctl.llama.fit.resolve import CHOOSES_OWN_ROWS, resolve
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.resolved import Resolved
from tools.generator import finish

INDEXER = "blk.0.indexer.k_norm.weight"


def write_model(path: Path, arch: str, tensor: str) -> str:
    """Write a GGUF file with one tensor, of which only the head is ever read; return its path."""
    writer = GGUFWriter(path, arch)
    writer.add_tensor(tensor, np.zeros(32, np.float32))
    finish(writer)
    return str(path)


def reason_for(resolved: Resolved, flag: str) -> str:
    (reason,) = [row.reason for row in resolved.values if row.flag == flag]
    return reason


def test_an_indexer_that_chooses_among_all_rows_allows_one_sequence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A reply would depend on the requests beside it, so there are none; the reason is shown."""
    path = write_model(tmp_path / "m.gguf", "deepseek32", INDEXER)
    resolved = resolve(ModelSettings(path=path, n_seqs=4))
    assert resolved.model.n_seqs == 1
    reason = "the model's indexer would choose among the rows of all requests"
    assert reason_for(resolved, "--parallel") == reason
    assert f"one request at a time: {reason}" in caplog.text


@pytest.mark.parametrize(
    ("arch", "tensor", "n_seqs"),
    [
        ("deepseek32", "blk.0.attn_k.weight", 4),
        (CHOOSES_OWN_ROWS, INDEXER, 4),
        ("deepseek32", INDEXER, 1),
    ],
    ids=["without an indexer", "rows of one sequence", "one sequence anyway"],
)
def test_other_models_keep_the_sequences_of_the_user(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arch: str, tensor: str, n_seqs: int
) -> None:
    path = write_model(tmp_path / "m.gguf", arch, tensor)
    resolved = resolve(ModelSettings(path=path, n_seqs=n_seqs))
    assert resolved.model.n_seqs == n_seqs
    assert "--parallel" not in resolved.reasons
    assert "one request at a time" not in caplog.text


def test_a_draft_model_without_a_type_gets_the_one_of_its_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "qwen3", "blk.0.attn_k.weight")
    draft = write_model(tmp_path / "d.gguf", "qwen3", "blk.0.attn_k.weight")
    resolved = resolve(ModelSettings(path=path), DraftSettings(draft_path=draft))
    assert resolved.drafts.draft_types == ("draft-simple",)
    reason = "as the draft model's file and the extension allow"
    assert reason_for(resolved, "--spec-type") == reason


def test_a_draft_model_of_another_type_is_an_error(tmp_path: Path) -> None:
    """The type decides which inputs a draft reads, so a wrong one is refused before loading."""
    path = write_model(tmp_path / "m.gguf", "qwen3", "blk.0.attn_k.weight")
    draft = write_model(tmp_path / "d.gguf", "qwen3", "blk.0.attn_k.weight")
    with pytest.raises(ModelError, match="is a file for --spec-type draft-simple, not for draft-e"):
        resolve(ModelSettings(path=path), DraftSettings(("draft-eagle3",), draft_path=draft))


@pytest.mark.parametrize("name", ["m.gguf", "d.gguf"])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, name: str) -> None:
    """Settings come from the head of a file, so a damaged one ends the start, not a request."""
    path = write_model(tmp_path / "m.gguf", "qwen3", "blk.0.attn_k.weight")
    draft = write_model(tmp_path / "d.gguf", "qwen3", "blk.0.attn_k.weight")
    (tmp_path / name).write_bytes(b"GGUF" + bytes(3))
    with pytest.raises(ModelError, match=name):
        resolve(ModelSettings(path=path), DraftSettings(draft_path=draft))
