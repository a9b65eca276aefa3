"""Automatic values of settings, and the reasons for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pyctl.llama.library.devices import Device
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.memory_plan import MIB, MemoryPlan, Place, Usage
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.resolved import Resolved

GPU = Device("CUDA0", "a GPU", True, 0, "CUDA0", 0, 24_000 * MIB, 24_000 * MIB)
CPU = replace(GPU, name="CPU", is_gpu=False)

MTP = DraftSettings(draft_types=("draft-mtp",))


@pytest.fixture
def on() -> Any:
    """on(GPU, n_ubatch=64) -> settings resolved on a machine with these devices and 16 cores."""

    def resolve(*devices: Device, drafts: DraftSettings = MTP, **fields: Any) -> Resolved:
        return Resolved.from_settings(
            ModelSettings(path="m.gguf", **fields), drafts, devices, n_cores=16
        )

    return resolve


def shown(resolved: Resolved, flag: str) -> tuple[str, str]:
    """Return the value of ``flag`` and the reason for it."""
    (found,) = [(row.value, row.reason) for row in resolved.values if row.flag == flag]
    return found


@pytest.mark.parametrize(
    ("devices", "fields", "expected"),
    [
        ((CPU,), {}, ("512", "the default without a GPU")),
        ((GPU, CPU), {}, ("768", "the default on a GPU")),
        ((GPU, CPU), {"devices": ("none",)}, ("512", "the default without a GPU")),
        ((GPU, CPU), {"n_batch": 300}, ("300", "as many as --batch-size allows")),
        ((GPU, CPU), {"n_ubatch": 64}, ("64", "given")),
    ],
)
def test_the_micro_batch_follows_from_the_cards(
    on: Any, devices: tuple[Device, ...], fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    resolved = on(*devices, **fields)
    assert shown(resolved, "--ubatch-size") == expected
    assert resolved.batch_cost == (resolved.model.n_ubatch // 2 if resolved.gpus else 0)


def test_the_cards_in_use_are_shown(on: Any) -> None:
    assert shown(on(CPU), "--device") == ("none", "no GPU")
    assert shown(on(GPU, CPU), "--device") == ("CUDA0", "every GPU")
    assert shown(on(GPU, CPU, devices=("CUDA0",)), "--device") == ("CUDA0", "given")


def test_threads_are_explained(on: Any) -> None:
    resolved = on(CPU)
    assert shown(resolved, "--threads") == ("16", "one per core")
    small = replace(resolved, n_layer_bytes=3 * MIB)
    assert shown(small, "--threads") == (
        "3",
        "the weights of a layer occupy no more: 3.0 MiB",
    )
    assert shown(small, "--threads-batch") == ("16", "one per core")
    assert shown(on(CPU, n_threads=5), "--threads-batch") == ("5", "as --threads")


@pytest.mark.parametrize(
    ("n_draft", "n_ubatch", "n_state_history"), [(3, 64, 3), (100, 64, 62), (3, 1, 0), (0, 64, 0)]
)
def test_planes_and_their_tokens_fit_into_one_batch(
    on: Any, n_draft: int, n_ubatch: int, n_state_history: int
) -> None:
    drafts = replace(MTP, n_draft=n_draft)
    assert on(CPU, drafts=drafts, n_ubatch=n_ubatch).n_state_history == n_state_history


def test_fitting_is_explained(on: Any) -> None:
    place = Place("host", False, Usage(weights=1), None)
    given = on(CPU)
    for n_ctx, n_fitting, reason in (
        (0, 8192, "the model's own"),
        (0, 4096, "as much as fits into memory"),
        (4096, 4096, "given"),
    ):
        wanted = replace(given, model=replace(given.model, n_ctx=n_ctx))
        plan = MemoryPlan(n_fitting, 1, 1.0, 0, (place,), n_ctx_train=8192, n_layer_bytes=MIB)
        model = replace(wanted.model, n_gpu_layers=7, tensor_split=(1.0, 3.0))
        fitted = wanted.fitted(model, plan)
        assert shown(fitted, "--ctx-size") == (f"{n_fitting}", reason)
        assert shown(fitted, "--gpu-layers") == ("7", "as much as fits into memory")
        assert shown(fitted, "--tensor-split")[0] == "1,3"
        assert fitted.model.n_ctx == n_fitting
        assert fitted.n_threads == 1


@pytest.mark.parametrize(
    ("fields", "layers", "split"),
    [
        ({}, (3, 5), (3.0, 5.0)),
        ({}, (8, 0), ()),
        ({"split_mode": "row"}, (3, 5), ()),
        ({"devices": ("CUDA1", "CUDA0")}, (3, 5), (5.0, 3.0)),
        ({"tensor_split": (1.0, 1.0)}, (3, 5), (1.0, 1.0)),
    ],
)
def test_layers_are_split_between_gpus_the_same_at_every_start(
    on: Any, fields: dict[str, Any], layers: tuple[int, int], split: tuple[float, ...]
) -> None:
    resolved = on(GPU, replace(GPU, name="CUDA1"), CPU, **fields)
    place = Place("host", False, Usage(), None)
    placed = ("CUDA0",) * layers[0] + ("CUDA1",) * layers[1]
    plan = MemoryPlan(512, 1, 1.0, 0, (place,), placed, n_ctx_train=512)
    assert resolved.fitted(resolved.model, plan).model.tensor_split == split


def test_automatic_drafts_are_explained(on: Any) -> None:
    automatic = on(CPU, drafts=DraftSettings(draft_types=("auto",), n_draft=2))
    chosen = automatic.with_drafts(replace(MTP, n_draft=1), "as memory allows")
    assert shown(chosen, "--spec-type") == ("draft-mtp", "as memory allows")
    assert shown(chosen, "--spec-draft-n-max") == ("1", "as memory allows")
    assert shown(on(CPU), "--spec-type") == ("draft-mtp", "given")
    assert shown(on(CPU), "--spec-draft-n-max") == ("3", "default")


def test_contexts_beside_the_models_have_settings_of_their_own(on: Any) -> None:
    drafts = DraftSettings(
        draft_types=("draft-simple",), draft_path="d.gguf", draft_type_k="q8_0", draft_threads=2
    )
    resolved = on(CPU, drafts=drafts, n_seqs=4, n_threads=9, lora=(("l.gguf", 1.0),))
    draft = resolved.draft_file
    assert draft.model.path == "d.gguf"
    assert draft.model.type_k == "q8_0"
    assert draft.model.lora == ()
    assert draft.n_threads == 2
    assert draft.n_state_history == 0
    assert draft.n_outputs == 4
    assert resolved.head.model == replace(resolved.model, type_k="q8_0", lora=())
    embedder = resolved.embedder
    assert embedder.model.n_seqs == 1
    assert embedder.model.n_batch == resolved.model.n_ubatch


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 1000),
        ({"n_seqs": 4}, 1000),
        ({"n_seqs": 4, "kv_unified": False}, 250),
        ({"n_ctx_per_seq": 300}, 300),
    ],
)
def test_a_sequence_has_its_limit(on: Any, fields: dict[str, Any], expected: int) -> None:
    assert on(CPU, **fields).max_tokens(1000) == expected
