"""Formulas for the memory of a context without the extension."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyctl.llama.estimate import Shape, layer_of

SHAPE = Shape(
    width=64,
    widest=256,
    n_heads=8,
    n_kv_heads=2,
    key_length=16,
    value_length=8,
    n_kv_layers=3,
    n_recurrent_layers=5,
    state_inner=32,
    state_depth=4,
    state_groups=2,
    conv_taps=3,
)


@pytest.mark.parametrize(
    ("tensor", "layer"), [("blk.0.attn_q.weight", 0), ("blk.12.ffn_up", 12), ("output.weight", -1)]
)
def test_tensors_name_their_layers(tensor: str, layer: int) -> None:
    assert layer_of(tensor) == layer


def test_k_and_v_have_a_row_for_each_cell_and_layer() -> None:
    per_cell = 3 * (2 * 16 * 2 + 2 * 8 * 2)  # layers, and bytes of f16
    assert SHAPE.kv_bytes(100, "f16", "f16") == 100 * per_cell
    assert SHAPE.kv_bytes(100, "f32", "f16") == 100 * (per_cell + 3 * 2 * 16 * 2)
    quantised = SHAPE.kv_bytes(100, "q8_0", "q8_0")
    assert quantised == 100 * 3 * (2 * 16 + 2 * 8) * 34 // 32


def test_an_indexer_has_rows_of_its_own() -> None:
    indexed = replace(SHAPE, indexer_length=128)
    more = indexed.kv_bytes(100, "q8_0", "q8_0") - SHAPE.kv_bytes(100, "q8_0", "q8_0")
    assert more == 100 * 3 * 128 * 2, "in f16, whatever the others are"


def test_a_state_is_a_scan_and_a_convolution() -> None:
    scan = 32 * 4
    convolution = 3 * (32 + 2 * 2 * 4)
    assert SHAPE.state_bytes(1) == 5 * 4 * (scan + convolution)
    assert SHAPE.state_bytes(7) == 7 * SHAPE.state_bytes(1)
    assert replace(SHAPE, n_recurrent_layers=0).state_bytes(7) == 0


def test_buffers_hold_a_mask_and_activations() -> None:
    assert SHAPE.compute_bytes(1, 1000, stores_scores=False) == 4 * (1000 + 12 * 256)
    batch = SHAPE.compute_bytes(64, 1000, stores_scores=False)
    assert batch == 64 * 4 * (1000 + 12 * 256)


def test_scores_are_stored_without_flash_attention_and_by_indexers() -> None:
    plain = SHAPE.compute_bytes(1, 1000, stores_scores=False)
    assert SHAPE.compute_bytes(1, 1000, stores_scores=True) - plain == 4 * 2 * 8 * 1000
    indexed = replace(SHAPE, n_indexer_heads=6)
    assert indexed.compute_bytes(1, 1000, stores_scores=False) - plain == 4 * (6 + 4) * 1000
