from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from tools.generator import QWEN36_27B, SHAPES, TINY_DENSE, TINY_HYBRID, Shape, write_model
from tools.generator.shapes import tensors
from tools.generator.weights import deviation

if TYPE_CHECKING:
    from tests.model.tools.conftest import Load

TINY = [shape for shape in SHAPES.values() if not shape.quantised and shape.has_trunk]


@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_the_seed_decides_every_byte(tmp_path: Path, shape: Shape) -> None:
    for name, seed in [("a", 7), ("b", 7), ("c", 8)]:
        write_model(tmp_path / name, shape, seed=seed)
    first, same, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == same
    assert first != other
    assert len(first) < 4_000_000


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"old")
    monkeypatch.setattr("tools.generator.generate.fill", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_model(path, TINY_DENSE)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_quantised_tensors_have_the_wanted_deviation(tmp_path: Path) -> None:
    """Quantised weights have the planned deviation and no bias, so activations of a random model
    stay in the range of a trained one.
    """
    narrow = {
        "embedding": 512,
        "feed_forward": 512,
        "num_heads": 2,
        "num_kv_heads": 1,
        "vocab_size": 4096,
    }
    shape = replace(QWEN36_27B, num_layers=8, num_key_heads=2, num_value_heads=4, **narrow)
    write_model(tmp_path / "a.gguf", shape)
    expected = {tensor.name: deviation(shape, tensor) for tensor in tensors(shape)}
    seen = set()
    for tensor in GGUFReader(tmp_path / "a.gguf").tensors:
        if tensor.tensor_type.name.startswith("Q"):
            values = dequantize(tensor.data, tensor.tensor_type)
            assert values.std() == pytest.approx(expected[tensor.name], rel=0.05)
            assert abs(values.mean()) < 0.1 * values.std()
            seen.add(tensor.tensor_type.name)
    assert seen == {"Q4_K", "Q6_K", "Q8_0"}


def test_the_state_of_a_loaded_model_has_the_computed_size(loaded: Load) -> None:
    model = loaded("tiny-hybrid")
    model.evaluate([65])
    overhead = len(model.state()) - TINY_HYBRID.state_bytes
    assert 0 <= overhead < 1000
