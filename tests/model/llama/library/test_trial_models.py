"""The models on which a release of llama.cpp is tried: one of each class of memory that the
extension takes apart.
"""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from pyctl.llama.library.trial_models import list_trial_models, memory_classes, models_with_drafts
from pyctl.llama.loader import load
from pyctl.llama.memory.memory_check import TESTED
from pyctl.llama.settings.model_settings import ModelSettings


def test_each_class_of_memory_has_a_model() -> None:
    assert set(memory_classes()) == TESTED
    assert len(models_with_drafts()) == 1


@pytest.mark.parametrize("memory", memory_classes())
def test_a_model_has_the_memory_that_its_name_states(memory: str, tmp_path: Path) -> None:
    for path in list_trial_models(memory):
        model = tmp_path / path.stem
        model.write_bytes(lzma.decompress(path.read_bytes()))
        backend = load(ModelSettings(path=str(model), n_ctx=1024, n_ubatch=64, n_threads=1)).backend
        assert backend.memory.kv.type == memory
        assert backend.memory.kv.reason == ""
        backend.unload()
