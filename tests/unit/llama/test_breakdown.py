"""Formulas for the memory of a context without the extension."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyctl.llama.fit.breakdown import AttentionShape, StateShape, compute_bytes, tensor_layer

ATTENTION = AttentionShape(n_layers=3, n_heads=8, n_kv_heads=2, key_length=16, value_length=8)
STATES = StateShape(n_layers=5, inner=32, depth=4, n_groups=2, taps=3)


@pytest.mark.parametrize(
    ("tensor", "layer"), [("blk.0.attn_q.weight", 0), ("blk.12.ffn_up", 12), ("output.weight", -1)]
)
def test_tensors_name_their_layers(tensor: str, layer: int) -> None:
    assert tensor_layer(tensor) == layer


def test_k_and_v_have_a_row_for_each_cell_and_layer() -> None:
    per_cell = 3 * (2 * 16 * 2 + 2 * 8 * 2)  # layers, and bytes of f16
    assert ATTENTION.kv_bytes(100, "f16", "f16") == 100 * per_cell
    assert ATTENTION.kv_bytes(100, "f32", "f16") == 100 * (per_cell + 3 * 2 * 16 * 2)
    quantised = ATTENTION.kv_bytes(100, "q8_0", "q8_0")
    assert quantised == 100 * 3 * (2 * 16 + 2 * 8) * 34 // 32


def test_an_indexer_has_rows_of_its_own() -> None:
    indexed = replace(ATTENTION, indexer_length=128)
    more = indexed.kv_bytes(100, "q8_0", "q8_0") - ATTENTION.kv_bytes(100, "q8_0", "q8_0")
    assert more == 100 * 3 * 128 * 2, "in f16, whatever the others are"


def test_a_state_is_a_scan_and_a_convolution() -> None:
    scan = 32 * 4
    convolution = 3 * (32 + 2 * 2 * 4)
    assert STATES.state_bytes(1) == 5 * 4 * (scan + convolution)
    assert STATES.state_bytes(7) == 7 * STATES.state_bytes(1)
    assert replace(STATES, n_layers=0).state_bytes(7) == 0


def test_scores_are_stored_without_flash_attention_and_by_indexers() -> None:
    indexed = replace(ATTENTION, n_indexer_heads=6)
    assert ATTENTION.scores(are_stored=False) == 1, "the mask"
    assert ATTENTION.scores(are_stored=True) == 1 + 2 * 8
    assert indexed.scores(are_stored=False) == 1 + 6 + 4


def test_buffers_hold_scores_and_activations() -> None:
    assert compute_bytes(1, 1000, 3, 256) == 4 * (3 * 1000 + 12 * 256)
    assert compute_bytes(64, 1000, 3, 256) == 64 * compute_bytes(1, 1000, 3, 256)
