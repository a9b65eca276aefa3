"""Flags of the model reach llama.cpp and take effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from numpy.typing import NDArray

from pyctl.engine.backend import Placement
from pyctl.errors import ModelError
from pyctl.llama import loader
from pyctl.llama.fit.dry_runs import dry_run
from pyctl.llama.library.devices import check_gguf
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.memory_plan import MemoryPlan, Place, Usage
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.resolved import Resolved
from pyctl.prompt import as_tokens
from tools.generator import SHAPES, finish


@pytest.fixture(scope="module")
def opened(model_path: Callable[[str], Path]) -> Callable[..., Loaded]:
    def get(name: str = "tiny-dense", **fields: Any) -> Loaded:
        chosen = {"n_ctx": 512, "n_ubatch": 64, "n_threads": 1, **fields}
        return load(ModelSettings(path=str(model_path(name)), **chosen))

    return get


def logits(loaded: Loaded) -> NDArray[np.float32]:
    loaded.backend.evaluate(0, as_tokens([1, 2, 3, 4]), 0)
    found = loaded.backend.logits(0)
    loaded.backend.unload()
    return found


def adapter(path: Path, *, seed: int = 0) -> Path:
    """Write a LoRA of rank 2 on the first layer's queries of tiny-dense."""
    shape = SHAPES["tiny-dense"]
    random = np.random.default_rng(seed)
    writer = GGUFWriter(path, "qwen3")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0)
    width = shape.num_heads * shape.head_size
    writer.add_tensor(
        "blk.0.attn_q.weight.lora_a", random.normal(size=(2, shape.embedding)).astype(np.float32)
    )
    writer.add_tensor(
        "blk.0.attn_q.weight.lora_b", random.normal(size=(width, 2)).astype(np.float32)
    )
    finish(writer)
    return path


def test_the_description_has_types_and_places(opened: Callable[..., Loaded]) -> None:
    found = opened(type_k="q8_0", type_v="f16", placements=(("blk.0.ffn", "CPU"),)).info.placement
    n_layers = SHAPES["tiny-dense"].num_layers + 1  # the output is a layer
    assert replace(found, resolved=()) == Placement(
        "q8_0", "f16", n_layers, n_gpu_layers=0, n_rules=1
    )
    assert ("--override-tensor", "1 rules", "given") in found.resolved


def test_layers_count_where_they_are() -> None:
    places = tuple(
        Place(name, name != "host", Usage(), None) for name in ("CUDA0", "CUDA1", "host")
    )
    plan = MemoryPlan(512, 1, 1.0, 1, places, ("CPU", "CUDA0", "CUDA1", "CUDA1"))
    assert plan.n_gpu_layers == 3


def test_adapters_change_the_model_and_its_fingerprint(
    opened: Callable[..., Loaded], tmp_path: Path
) -> None:
    """An adapter's bytes and scale change logits and fingerprint; its path does not. Rows of a
    model with another adapter must never be restored.
    """
    path = str(adapter(tmp_path / "a.gguf"))
    plain, full, half, idle = (
        opened(lora=lora) for lora in ((), ((path, 1.0),), ((path, 0.5),), ((path, 0.0),))
    )
    assert len({loaded.info.fingerprint for loaded in (plain, full, half, idle)}) == 4
    names = [
        opened(lora=((str(adapter(tmp_path / "b.gguf", seed=seed)), 1.0),)).info.fingerprint
        for seed in (0, 1)
    ]
    assert [name == full.info.fingerprint for name in names] == [True, False], (
        "its bytes count, and not its path"
    )
    first, *others = (logits(loaded) for loaded in (plain, full, half, idle))
    assert [bool(np.array_equal(first, other)) for other in others] == [False, False, True]
    assert not np.array_equal(others[0], others[1])


def test_an_adapter_that_cannot_be_loaded(opened: Callable[..., Loaded], tmp_path: Path) -> None:
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    for name in ("b.gguf", "missing.gguf"):
        with pytest.raises(ModelError, match=f"cannot load the adapter .*{name}"):
            opened(lora=((str(tmp_path / name), 1.0),))


def test_metadata_in_place_of_the_file_s(opened: Callable[..., Loaded]) -> None:
    changed = opened(
        metadata=(("qwen3.context_length", 1024), ("qwen3.rope.freq_base", 5e4), ("x.y", "text"))
    )
    plain = opened()
    assert changed.info.n_ctx_train == 1024
    assert changed.info.fingerprint != plain.info.fingerprint
    assert not np.array_equal(logits(changed), logits(plain))


def test_placements_and_devices_that_are_not_there(opened: Callable[..., Loaded]) -> None:
    opened(placements=((r"blk\.0\.", "CPU"),), devices=("none",)).backend.unload()
    with pytest.raises(ModelError, match="--override-tensor: no buffer type CUDA7; found CPU"):
        opened(placements=((r"blk\.0\.", "CUDA7"),))
    with pytest.raises(ModelError, match="--device: no device CUDA7; found "):
        opened(devices=("CUDA7",))


def test_ways_of_loading(opened: Callable[..., Loaded]) -> None:
    plain = logits(opened())
    ways: tuple[dict[str, Any], ...] = (
        {"load_mode": "none", "check_tensors": True, "lazy_mode": "off"},
        {"repack": False, "no_host": True, "op_offload": False, "swa_full": True},
    )
    for way in ways:
        assert np.array_equal(logits(opened(**way)), plain)


def test_a_dry_run_holds_no_weights(model_path: Callable[[str], Path]) -> None:
    path = model_path("tiny-hybrid")
    with dry_run(Resolved.from_settings(ModelSettings(path=str(path)))) as run:
        assert sum(run.tensors.values()) == pytest.approx(path.stat().st_size, rel=0.05)
        assert run.n_layers == SHAPES["tiny-hybrid"].num_layers


def test_copies_that_hold_up_evaluation_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    gpus = [Place(f"CUDA{i}", True, Usage(weights=5, kv=3, states=1), 100) for i in range(2)]
    host = Place("host", False, Usage(weights=5), 100)
    for places, expected in (((*gpus, host), ["CUDA0 and CUDA1"]), ((host,), [])):
        caplog.clear()
        loader._warn_of_blocking_copies(MemoryPlan(512, 1, 1.0, 1, places))
        assert [message.split(" are on ")[1] for message in caplog.messages] == expected


def test_a_directory_in_place_of_a_model_names_its_models(tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    for name in "gfedcba":
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(
        ModelError, match=r"Is a directory; it holds a\.gguf, b\.gguf, .*, e\.gguf, \.\.\.$"
    ):
        check_gguf(tmp_path)
    with pytest.raises(
        ModelError, match=r"Is a directory; to serve all models below it: --models-dir "
    ):
        check_gguf(empty)


def test_metadata_of_the_user_reach_the_vocabulary(model_path: Callable[[str], Path]) -> None:
    metadata = (("tokenizer.ggml.eos_token_id", 7),)
    settings = ModelSettings(
        path=str(model_path("tiny-dense")), n_ctx=512, n_threads=1, metadata=metadata
    )
    loaded = load(settings)
    assert loaded.tokenizer.eos == loaded.backend.tokenizer.eos == 7
    assert 7 in loaded.tokenizer.end_tokens()
    loaded.backend.unload()
