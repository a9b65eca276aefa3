from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

import tools.generator
from tools.generator import QWEN36_27B, SHAPES, TINY_DENSE, TINY_HYBRID, Shape, write_model
from tools.generator.__main__ import main
from tools.generator.shapes import tensors
from tools.generator.weights import deviation

if TYPE_CHECKING:
    from tests.model.tools.conftest import Load, Loaded

TINY = [shape for shape in SHAPES.values() if not shape.quantised and shape.has_trunk]


@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_the_seed_decides_every_byte(tmp_path: Path, shape: Shape) -> None:
    for name, seed in [("a", 7), ("b", 7), ("c", 8)]:
        write_model(tmp_path / name, shape, seed=seed)
    first, same, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == same
    assert first != other
    assert len(first) < 4_000_000


def test_the_command_line_writes_the_same_file(tmp_path: Path) -> None:
    main(["--shape", "tiny-dense", "-o", str(tmp_path / "a.gguf"), "--seed", "3"])
    write_model(tmp_path / "b.gguf", TINY_DENSE, seed=3)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    write_model(tmp_path / "a.gguf", TINY_DENSE, progress=lambda done, total: steps.append((done, total)))
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1] == sum(tensor.num_bytes for tensor in tensors(TINY_DENSE))


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"old")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_model(path, TINY_DENSE, progress=interrupt)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_quantised_tensors_have_the_wanted_deviation(tmp_path: Path) -> None:
    narrow = {"embedding": 512, "feed_forward": 512, "num_heads": 2, "num_kv_heads": 1, "vocab_size": 4096}
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


def test_quantised_layers_differ(tmp_path: Path) -> None:
    shape = replace(QWEN36_27B, num_layers=2, embedding=512, feed_forward=512, vocab_size=512)
    write_model(tmp_path / "a.gguf", shape)
    found = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "a.gguf").tensors}
    assert not np.array_equal(found["blk.0.ffn_gate.weight"], found["blk.1.ffn_gate.weight"])
    assert not np.array_equal(found["blk.0.ffn_gate.weight"], found["blk.0.ffn_up.weight"])


def test_logits_are_finite_and_follow_the_prompt(tiny: Loaded) -> None:
    logits = []
    for text in ("one prompt", "two prompt"):
        tiny.forget()
        logits.append(tiny.evaluate(tiny.tokenize(text)))
    assert np.isfinite(logits).all()
    assert np.abs(logits[0] - logits[1]).max() > 0.1


@pytest.mark.parametrize("cache_type", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_other_cache_types_work(loaded: Load, shape: Shape, cache_type: str) -> None:
    tokens = list(range(64, 96)) * 20
    logits = []
    for model in (loaded(shape.name), loaded(shape.name, getattr(llama_cpp, f"GGML_TYPE_{cache_type}"))):
        model.forget()
        logits.append(model.evaluate(tokens))
    assert np.isfinite(logits).all()
    assert np.corrcoef(*logits)[0, 1] > 0.9


def test_the_state_of_a_loaded_model_has_the_computed_size(loaded: Load) -> None:
    model = loaded("tiny-hybrid")
    model.evaluate([65])
    overhead = len(model.state()) - TINY_HYBRID.state_bytes
    assert 0 <= overhead < 1000


def test_exported_names_exist() -> None:
    assert all(hasattr(tools.generator, name) for name in tools.generator.__all__)
