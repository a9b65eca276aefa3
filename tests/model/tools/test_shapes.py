from __future__ import annotations

import math

import pytest

from tools.generator import QWEN36_27B, QWEN36_35B_A3B, TINY_DENSE, TINY_HYBRID, TINY_RERANK, Shape
from tools.generator.shapes import tensors


@pytest.mark.parametrize(
    ("shape", "expected"), [(QWEN36_27B, 156_893_184), (QWEN36_35B_A3B, 65_863_680)]
)
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
def test_row_bytes_of_the_real_models(
    shape: Shape, type_k: str, type_v: str, expected: int
) -> None:
    assert shape.row_bytes(type_k, type_v) == expected


@pytest.mark.parametrize(("name", "message"), [("q5_9", "unknown"), ("q4_k", "blocks of 256")])
def test_a_cache_type_that_does_not_fit_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TINY_HYBRID.row_bytes(name)


def test_a_reranker_has_a_classifier_beside_what_others_have() -> None:
    more = {tensor.name: tensor.dims for tensor in tensors(TINY_RERANK)}
    assert more.pop("cls.output.weight") == (2, TINY_RERANK.embedding)
    assert more == {tensor.name: tensor.dims for tensor in tensors(TINY_DENSE)}


@pytest.mark.parametrize(
    ("shape", "billions", "gib"), [(QWEN36_27B, 26.9, 15.1), (QWEN36_35B_A3B, 34.7, 19.6)]
)
def test_full_size_shapes_have_the_size_of_the_real_models(
    shape: Shape, billions: float, gib: float
) -> None:
    listing = tensors(shape)
    assert sum(math.prod(tensor.dims) for tensor in listing) / 1e9 == pytest.approx(
        billions, abs=0.05
    )
    assert sum(tensor.num_bytes for tensor in listing) / 2**30 == pytest.approx(gib, abs=0.1)
