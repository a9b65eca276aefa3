from __future__ import annotations

import math

import pytest

from tools.generator import QWEN36_27B, QWEN36_35B_A3B, SHAPES, Shape
from tools.generator.shapes import tensors


@pytest.mark.parametrize(("shape", "billions", "gib"), [(QWEN36_27B, 26.9, 15.1), (QWEN36_35B_A3B, 34.7, 19.6)])
def test_full_size_shapes_have_the_size_of_the_real_models(shape: Shape, billions: float, gib: float) -> None:
    listing = tensors(shape)
    assert sum(math.prod(tensor.dims) for tensor in listing) / 1e9 == pytest.approx(billions, abs=0.05)
    assert sum(tensor.num_bytes for tensor in listing) / 2**30 == pytest.approx(gib, abs=0.1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_names_are_unique(shape: Shape) -> None:
    names = [tensor.name for tensor in tensors(shape)]
    assert len(names) == len(set(names))


def test_only_the_full_size_shapes_are_quantised() -> None:
    types = {name: {tensor.type.name for tensor in tensors(shape)} for name, shape in SHAPES.items()}
    for name, found in types.items():
        assert found == ({"F32"} if name.startswith("tiny") else {"F32", "Q4_K", "Q6_K", "Q8_0"})
