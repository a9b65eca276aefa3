"""Each setting changes its own member of llama.cpp's parameters, and no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from llama_cpp import llama_cpp as api

from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.params import ModelParams, context_params
from pyctl.llama.settings.resolved import Resolved

PLAIN = [
    *(
        ("n_gpu_layers", 3),
        ("main_gpu", 1),
        ("check_tensors", True),
        ("no_host", True),
        ("n_batch", 1024),
    ),
    *(
        ("n_ubatch", 64),
        ("n_threads_batch", 78),
        ("offload_kqv", False),
        ("op_offload", False),
        ("swa_full", True),
    ),
    *(
        ("rope_freq_base", 1e6),
        ("rope_freq_scale", 0.5),
        ("yarn_orig_ctx", 32768),
        ("yarn_ext_factor", 0.5),
    ),
    *(("yarn_attn_factor", 1.5), ("yarn_beta_fast", 16.0), ("yarn_beta_slow", 2.0)),
]
NAMED = [
    *(
        ("split_mode", "row", "split_mode", 2),
        ("load_mode", "dio", "load_mode", 4),
        ("lazy_mode", "off", "lazy_mode", 0),
    ),
    *(("repack", False, "use_extra_bufts", False), ("flash_attn", "off", "flash_attn_type", 0)),
    *(
        ("type_k", "q8_0", "type_k", 8),
        ("type_v", "q8_0", "type_v", 8),
        ("rope_scaling", "yarn", "rope_scaling_type", 2),
    ),
    *((name, value, name, value) for name, value in PLAIN),
]
OF_DRAFTS = [
    *(
        ("draft_gpu_layers", 3, {"n_gpu_layers": 3}),
        ("draft_threads", 7, {"n_threads": 7, "n_threads_batch": 7}),
    ),
    *(("draft_type_k", "q8_0", {"type_k": 8}), ("draft_type_v", "q8_0", {"type_v": 8})),
]
BASE = ModelSettings(n_ubatch=32, n_threads=5, n_threads_batch=5)


def numbers(settings: ModelSettings) -> dict[str, int | float]:
    """Return the members of both structures that are numbers."""
    made = ModelParams(settings)
    structs = (made.struct, context_params(Resolved.from_settings(settings), 512))
    kinds = [
        (struct, kind) for struct in structs for kind in type(struct).__mro__
    ]  # also those of a `widened` one
    named = [
        (struct, name) for struct, kind in kinds for name, *_ in vars(kind).get("_fields_", ())
    ]
    members = {name: getattr(struct, name) for struct, name in named}
    return {name: value for name, value in members.items() if isinstance(value, (int, float))}


def changes(before: ModelSettings, after: ModelSettings) -> dict[str, int | float]:
    made = numbers(before)
    return {name: value for name, value in numbers(after).items() if made[name] != value}


@pytest.mark.parametrize(("field", "value", "member", "number"), NAMED)
def test_a_setting_changes_its_own_member(
    field: str, value: Any, member: str, number: float
) -> None:
    assert changes(BASE, replace(BASE, **{field: value})) == {member: number}


@pytest.mark.parametrize(("field", "value", "members"), OF_DRAFTS)
def test_a_setting_of_drafts_changes_that_of_their_model(
    field: str, value: Any, members: dict[str, int]
) -> None:
    drafts = DraftSettings()
    assert (
        changes(drafts.for_file(BASE), replace(drafts, **{field: value}).for_file(BASE)) == members
    )


@pytest.mark.parametrize(
    ("features", "repack"), [(b"REPACK = 1", True), (b"AVX2 = 1 | AMX_INT8 = 1", False)]
)
def test_weights_are_not_rearranged_where_amx_would_multiply_them(
    monkeypatch: pytest.MonkeyPatch, features: bytes, repack: bool
) -> None:
    monkeypatch.setattr(api, "llama_print_system_info", lambda: features)
    assert Resolved.from_settings(ModelSettings()).model.repack == repack
    assert not Resolved.from_settings(ModelSettings(repack=False)).model.repack
