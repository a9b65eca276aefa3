"""Which servers write receipts, and the settings with which a model is loaded again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.cli.receipts import load_recorded
from pyctl.errors import ReceiptError
from tests.unit.cli.talking import receipts_in, talk


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path]) -> Path:
    return model_path("tiny-hybrid")


@pytest.mark.parametrize(
    ("flags", "has_receipts"),
    [
        (("--exact",), True),
        (("--exact", "-np", "3"), True),
        (("-np", "1"), True),
        (("-np", "2"), False),
        (("--exact", "--no-receipts"), False),
        (("--exact", "--disk-prefix-cache", "off"), False),
    ],
    ids=str,
)
def test_servers_that_write_receipts(
    model: Path, tmp_path: Path, flags: tuple[str, ...], has_receipts: bool
) -> None:
    numbers = talk(model, tmp_path, flags)
    assert [number > 0 for number in numbers] == [has_receipts] * len(numbers)
    assert receipts_in(tmp_path).ids() == [number for number in numbers if number]
    assert receipts_in(tmp_path).directory.exists() is has_receipts


@pytest.mark.parametrize("flags", [("--exact", "-ctk", "q8_0", "-ctv", "q8_0"), ("-np", "1")])
def test_a_model_is_loaded_again_with_all_of_its_settings(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    monkeypatch.chdir(model.parent)
    number, *_ = talk(Path(model.name), tmp_path, flags)
    monkeypatch.chdir(tmp_path)
    provenance = receipts_in(tmp_path).read(number).provenance
    assert provenance.is_exact is ("--exact" in flags)
    assert provenance.settings["model"]["path"] == str(model)
    loaded = load_recorded(provenance)
    try:
        assert loaded.backend.facts.n_ctx == 1024
        assert loaded.backend.facts.n_ubatch == 128
        assert loaded.backend.threads == (1, 1)
    finally:
        loaded.backend.unload()


def test_a_model_file_that_changed_is_refused(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(model.read_bytes())
    number, *_ = talk(copy, tmp_path / "kv")
    provenance = receipts_in(tmp_path / "kv").read(number).provenance
    data = bytearray(copy.read_bytes())
    data[-8] ^= 1  # in the last tensor
    copy.write_bytes(data)
    with pytest.raises(ReceiptError, match="the model, the machine, or a variable"):
        load_recorded(provenance)
