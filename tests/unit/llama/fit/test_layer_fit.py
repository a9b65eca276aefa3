"""The weights that leave the GPUs."""

from __future__ import annotations

import pytest

from pyctl.llama.fit.layer_fit import CpuShare, LayerSizes
from pyctl.llama.settings.placements import experts_on_cpu

TENSORS = {
    "token_embd.weight": 999,
    **{f"blk.{i}.ffn_up_exps.weight": 100 for i in range(4)},
    **{f"blk.{i}.attn_q.weight": 20 for i in range(4)},
    "blk.4.attn_q.weight": 7,
}

SIZES = LayerSizes.from_tensors(TENSORS, 4)


def test_sizes_count_experts_and_whole_layers() -> None:
    assert LayerSizes(experts=(100,) * 4, blocks=(120,) * 4) == SIZES
    assert SIZES.n_layers == 4


@pytest.mark.parametrize(
    ("missing", "rows", "can_move_experts", "expected"),
    [
        (1, 0, True, CpuShare(n_experts=1)),
        (100, 0, True, CpuShare(n_experts=1)),
        (101, 0, True, CpuShare(n_experts=2)),
        (401, 0, True, CpuShare(n_layers=4, n_all=4)),
        (100, 0, False, CpuShare(n_layers=1, n_all=4)),
        (240, 0, False, CpuShare(n_layers=2, n_all=4)),
        (240, 480, False, CpuShare(n_layers=1, n_all=4)),
        (9999, 0, False, CpuShare(n_layers=4, n_all=4)),
    ],
)
def test_as_little_leaves_as_frees_enough(
    missing: int, rows: int, can_move_experts: bool, expected: CpuShare
) -> None:
    found = CpuShare().freeing(missing, SIZES, rows, can_move_experts=can_move_experts)
    assert found == expected


def test_a_share_grows_from_what_has_left() -> None:
    experts = CpuShare(n_experts=3)
    assert experts.freeing(100, SIZES, 0, can_move_experts=True) == CpuShare(n_experts=4)
    layers = experts.freeing(101, SIZES, 0, can_move_experts=True)
    assert layers == CpuShare(n_experts=3, n_layers=1, n_all=4)


def test_a_share_has_the_values_of_its_flags() -> None:
    share = CpuShare(n_experts=2, n_layers=1, n_all=4)
    assert share.placements == experts_on_cpu(2)
    assert share.n_gpu_layers == 4, "three layers and the output"
