from __future__ import annotations

import pytest

from tools.generator import QWEN36_27B, QWEN36_35B_A3B, SHAPES, TINY_DENSE, TINY_HYBRID, TINY_RERANK, Shape
from tools.generator.shapes import tensors


@pytest.mark.parametrize(("shape", "expected"), [(QWEN36_27B, 156_893_184), (QWEN36_35B_A3B, 65_863_680)])
def test_state_bytes_of_the_real_models(shape: Shape, expected: int) -> None:
    assert shape.state_bytes == expected


@pytest.mark.parametrize(
    ("shape", "type_k", "type_v", "expected"),
    [
        (QWEN36_27B, "f16", "f16", 65_536),
        (QWEN36_27B, "q8_0", "q8_0", 34_816),
        (QWEN36_27B, "q8_0", "f16", 50_176),
        (QWEN36_35B_A3B, "f16", "f16", 20_480),
        (QWEN36_35B_A3B, "q8_0", "q8_0", 10_880),
    ],
)
def test_row_bytes_of_the_real_models(shape: Shape, type_k: str, type_v: str, expected: int) -> None:
    assert shape.row_bytes(type_k, type_v) == expected


def test_a_dense_model_has_no_state() -> None:
    assert TINY_DENSE.state_bytes == 0
    assert TINY_DENSE.num_attention_layers == TINY_DENSE.num_layers


def test_every_fourth_layer_of_a_hybrid_model_is_attention() -> None:
    attention = [layer for layer in range(TINY_HYBRID.num_layers) if not TINY_HYBRID.is_recurrent(layer)]
    assert attention == [3, 7]


@pytest.mark.parametrize(("name", "message"), [("q5_9", "unknown"), ("q4_k", "blocks of 256")])
def test_a_cache_type_that_does_not_fit_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TINY_HYBRID.row_bytes(name)


def test_shapes_are_listed_by_their_names() -> None:
    assert all(name == shape.name for name, shape in SHAPES.items())


def test_a_reranker_has_a_classifier_beside_what_others_have() -> None:
    more = {tensor.name: tensor.dims for tensor in tensors(TINY_RERANK)}
    assert more.pop("cls.output.weight") == (2, TINY_RERANK.embedding)
    assert more == {tensor.name: tensor.dims for tensor in tensors(TINY_DENSE)}
