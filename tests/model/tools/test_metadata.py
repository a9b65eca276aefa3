from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader

from tools.generator import TINY_HYBRID, cached_model
from tools.generator.vocab import read_metadata


def test_values_are_those_of_the_reference_reader(models: Path) -> None:
    path = cached_model(TINY_HYBRID, models)
    reference = GGUFReader(path).fields
    metadata = read_metadata(path)
    assert metadata == {key: reference[key].contents() for key in reference if not key.startswith("GGUF.")}


@pytest.mark.parametrize("size", [0, 3, 30, 500])
def test_a_file_that_is_cut_off_is_refused(models: Path, tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(cached_model(TINY_HYBRID, models).read_bytes()[:size])
    with pytest.raises(ValueError, match="damaged: it ends"):
        read_metadata(path)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("This is not a model, but it is long enough.")
    with pytest.raises(ValueError, match="not a GGUF file"):
        read_metadata(path)
