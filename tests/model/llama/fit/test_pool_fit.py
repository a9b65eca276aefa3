"""Fitting of a pool of rows: resident layers, the context, and models without a pool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyctl.errors import ModelError
from pyctl.llama.fit import dry_runs
from pyctl.llama.fit.dry_runs import MemoryMeter
from pyctl.llama.fit.fitting import fit_all
from pyctl.llama.fit.pool_fit import pool_plan
from pyctl.llama.library.devices import Device
from pyctl.llama.settings.memory_plan import MIB, MemoryPlan
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.llama.settings.resolved import Resolved
from tests.model.llama.fit.stated_memory import on_gpus, state, state_host
from tools.generator import SHAPES

N_CTX = 65_536


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """on_gpu(n): as if all went to a GPU with ``n`` free bytes."""

    def use(free: int) -> None:
        gpu = Device("CUDA0", "a GPU", True, 0, "CUDA0", 0, free, free)
        on_gpus(monkeypatch, (gpu,), "CUDA0")

    return use


def planned(path: Path, n_tokens: int, **fields: Any) -> MemoryPlan:
    settings = ModelSettings(path=str(path), **{"n_ctx": N_CTX, "n_ubatch": 64, **fields})
    found = fit_all(Resolved.from_settings(settings), None, PoolSettings(n_tokens))
    assert found.memory.pool is not None
    assert found.model.n_ctx == found.memory.n_ctx
    return found.memory


@pytest.mark.parametrize(
    ("name", "types"), [("tiny-dense", "f16"), ("tiny-hybrid", "q8_0"), ("tiny-moe", "q4_0")]
)
def test_tokens_become_layers(
    model_path: Callable[[str], Path], on_gpu: Callable[[int], None], name: str, types: str
) -> None:
    """The size of a pool in tokens becomes resident layers, the rest of K and V moves to the host
    byte for byte, and the compute buffer grows by the mask and the unpacked rows.
    """
    on_gpu(10_000 * MIB)
    shape = SHAPES[name]
    path = model_path(name)
    fields = {"type_k": types, "type_v": types}
    row = round(shape.row_bytes(types, types))
    plans = {n: planned(path, n, **fields) for n in (N_CTX // 2, N_CTX, 10 * N_CTX)}
    whole = plans[N_CTX]
    half = plans[N_CTX // 2]
    assert plans[10 * N_CTX].pool == whole.pool
    assert whole.pool is not None
    assert half.pool is not None
    n_layers = whole.pool.n_layers
    assert whole.pool.n_resident == n_layers
    assert whole.pool.n_stages == 0
    assert whole.pool.host_bytes == 0
    assert whole.pool.device_bytes == N_CTX * row
    assert half.pool.n_resident == max(n_layers // 2 - 2, 0)
    (gpu,), (other,) = whole.gpus, half.gpus
    assert (
        gpu.usage.kv - other.usage.kv
        == whole.pool.device_bytes - half.pool.device_bytes
        == N_CTX * row // 2
    )
    assert (
        half.host.usage.kv - whole.host.usage.kv
        == half.pool.host_bytes
        == N_CTX * row * half.pool.n_streamed // n_layers
    )
    # A mask for 64 tokens, and beside quantised rows those of one layer in f16, behind attention's
    # output for a batch.
    values = (
        0 if types == "f16" else round(row / {"q8_0": 34 / 32, "q4_0": 18 / 32}[types] / n_layers)
    )
    output = 64 * 4 * shape.num_heads * shape.head_size if values else 0
    with dry_runs.dry_run(
        Resolved.from_settings(ModelSettings(path=str(path), n_ubatch=64, **fields))
    ) as run:
        small = run.plan(1024)
    assert gpu.usage.compute - small.gpus[0].usage.compute == N_CTX * (2 * 64 + 2 * values) + output
    table = "\n".join(half.lines(0))
    assert f"KV of {half.pool.n_streamed} of {n_layers} layers, streamed" in table
    assert "are read for each token" in table
    assert "streamed" not in "\n".join(whole.lines(0))


def test_a_pool_takes_what_fitting_leaves(
    model_path: Callable[[str], Path],
    on_gpu: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An automatic pool uses the memory that is left to the byte: one byte less is one resident
    layer less; with room for everything there is no pool.
    """
    caplog.set_level(logging.INFO)
    path = model_path("tiny-dense")
    margin = {"fit_target": (100,)}
    on_gpu(10_000 * MIB)
    minimum = planned(path, N_CTX // 4, **margin)
    assert minimum.pool is not None
    total = minimum.gpus[0].usage.total + 100 * MIB
    layer = minimum.pool.layer_bytes
    assert minimum.pool.n_layers == 4
    assert minimum.pool.n_stages == 1
    for free, n_resident, n_stages in (
        (total, 0, 1),
        (total + 2 * layer - 1, 0, 2),
        (total + 2 * layer, 1, 2),
        (total - MIB, 0, 1),  # which is too little, and the table says so
    ):
        on_gpu(free)
        pool = planned(path, -1, **margin).pool
        assert pool is not None
        assert pool.n_resident == n_resident
        assert pool.n_stages == n_stages
    on_gpu(10_000 * MIB)
    settings = Resolved.from_settings(ModelSettings(path=str(path), n_ctx=N_CTX))
    assert pool_plan(MemoryMeter(settings), PoolSettings(-1)) is None
    assert caplog.messages[-1] == "--kv-pool disabled: all of K and V fit"


def test_the_context_is_cut_to_what_ram_has_room_for(
    model_path: Callable[[str], Path],
    on_gpu: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A context left open shrinks until its pool fits into RAM; one that was given is refused with
    the memory that it needs.
    """
    path = model_path("tiny-dense")
    on_gpu(10_000 * MIB)
    maximum = planned(path, 262_144 // 2, n_ctx=0)
    assert maximum.pool is not None
    assert maximum.n_ctx == 262_144
    state_host(monkeypatch, maximum.host.usage.total - 50 * MIB)
    less = planned(path, 262_144 // 2, n_ctx=0, load_mode="none")
    assert less.pool is not None
    assert 131_072 < less.n_ctx < 262_144
    assert less.host.shortage() == 0
    state_host(monkeypatch, 20 * MIB)
    with pytest.raises(ModelError, match=r"cannot make the context: 65536 tokens need about"):
        planned(path, N_CTX // 2)


def test_what_cannot_be_pooled_runs_as_before(
    model_path: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each model or machine without a pool runs without it, and the log names the reason; only a
    size that cannot work is an error.
    """
    caplog.set_level(logging.INFO)
    settings = Resolved.from_settings(
        ModelSettings(path=str(model_path("tiny-hybrid")), n_ctx=4096)
    )
    assert pool_plan(MemoryMeter(settings), PoolSettings(-1)) is None
    assert caplog.messages[-1] == "--kv-pool disabled: no GPU"
    with pytest.raises(
        ModelError,
        match="--kv-pool 2047 is too small for 4096 tokens of context: it must be at least 2048",
    ):
        pool_plan(MemoryMeter(settings), PoolSettings(2047))

    def refused(reason: str) -> None:
        assert pool_plan(MemoryMeter(settings), PoolSettings(4096)) is None
        assert caplog.messages[-1].startswith(f"--kv-pool disabled: {reason}")

    gpu = Device("CUDA0", "a GPU", True, 0, "CUDA0", 0, MIB, MIB)
    whole = settings.tensors
    with monkeypatch.context() as patch:
        patch.setattr(Resolved, "tensors", {**whole, "rope_factors_long.weight": 64})
        refused("this model's positions depend on the size of the context")
    for places, reason in (
        ([], "this model has no single cache of K and V"),
        (["CUDA0", ""], "K and V are on several devices: CUDA0, host"),
    ):
        with monkeypatch.context() as patch:
            state(patch, (gpu,), {"row_places": lambda _, found=places: found})
            refused(reason)
