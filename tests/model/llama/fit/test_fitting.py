"""Fitting into memory: what shrinks first, and what the user has chosen stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyctl.errors import ModelError
from pyctl.llama.fit import dry_runs
from pyctl.llama.fit.dry_runs import dry_run
from pyctl.llama.fit.fitting import fit_all
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.memory_plan import MIB, MemoryPlan, Place, Usage
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.placements import experts_on_cpu
from pyctl.llama.settings.resolved import NO_DRAFTS, Resolved
from tests.model.llama.fit.stated_memory import state_host

GPU_LAYERS = 33


class Run:
    """A model of 32 layers with 100 MiB of experts and 20 MiB of others in each, 0.1 MiB of KV a
    token, on one GPU.
    """

    n_ctx_train = 65_536
    n_layers = 32

    def __init__(self, settings: ModelSettings, free: int, host: int) -> None:
        self.settings = settings
        self.free = free
        self.host = host
        self.tensors = {f"blk.{i}.ffn_up_exps.weight": 100 * MIB for i in range(32)}
        self.tensors |= {f"blk.{i}.attn_q.weight": 20 * MIB for i in range(32)}

    def plan(self, n_ctx: int) -> MemoryPlan:
        on_gpu = min(self.settings.n_gpu_layers - 1, 32) if self.settings.n_gpu_layers >= 0 else 32
        experts = max(on_gpu - len(self.settings.placements), 0)
        weights = (on_gpu * 20 + experts * 100) * MIB
        kv = n_ctx * MIB // 10
        gpu = Usage(weights, kv * on_gpu // 32, 0, 500 * MIB)
        host = Usage(32 * 120 * MIB - weights, kv - kv * on_gpu // 32, 0, 10 * MIB)
        margin = self.settings.fit_target[0] * MIB
        places = (
            Place("CUDA0", True, gpu, self.free, margin=margin),
            Place("host", False, host, self.host, is_mapped=True),
        )
        return MemoryPlan(n_ctx, 1, MIB / 10, 0, places)


class Unmeasured(Run):
    """A model of which the file shows ten times the experts that leave the GPU."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        for name in self.tensors:
            self.tensors[name] *= 10


@pytest.fixture
def fitting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ModelSettings, MemoryPlan]]:
    """fitting(free MiB, field=...) -> settings and plan for a GPU with that much free memory."""

    def run_with(
        free: int, host: int = 64_000, model: type[Run] = Run, **fields: Any
    ) -> tuple[ModelSettings, MemoryPlan]:
        @contextmanager
        def stub(resolved: Resolved, *_: object) -> Iterator[Run]:
            yield model(resolved.model, free * MIB, host * MIB)

        monkeypatch.setattr(dry_runs, "dry_run", stub)
        fitted = fit_all(Resolved(ModelSettings(path="m.gguf", **fields)))
        return fitted.model, fitted.memory

    return run_with


def test_what_fits_stays_as_it_is(fitting: Callable[..., tuple[ModelSettings, MemoryPlan]]) -> None:
    settings, plan = fitting(24_000)
    assert settings == ModelSettings(path="m.gguf", n_ctx=65_536)
    assert list(plan.warnings(8192 * MIB)) == []


def test_an_open_context_shrinks_first(
    fitting: Callable[..., tuple[ModelSettings, MemoryPlan]],
) -> None:
    settings, plan = fitting(8_000)
    assert settings.n_gpu_layers == -1
    assert settings.placements == ()
    # 8000 free - 1024 margin - 3840 weights - 500 computing, at 0.1 a token
    assert 26_360 - 512 < settings.n_ctx <= 26_360
    assert settings.n_ctx % 256 == 0
    assert plan.n_ctx == settings.n_ctx
    assert fitting(8_000, fit_target=(2048,))[0].n_ctx < settings.n_ctx - 10_000
    assert fitting(8_000, fit=False)[0].n_ctx == 65_536


def test_then_experts_leave_the_gpu(
    fitting: Callable[..., tuple[ModelSettings, MemoryPlan]],
) -> None:
    settings, plan = fitting(5_000, n_ctx=8192)
    assert settings.placements == experts_on_cpu(12)  # 1183 MiB too much
    assert plan.gpus[0].shortage(1024 * MIB) == 0
    assert 4096 <= fitting(5_000)[0].n_ctx < 8192


def test_the_plan_is_of_the_settings_though_no_move_was_enough(
    fitting: Callable[..., tuple[ModelSettings, MemoryPlan]],
) -> None:
    settings, plan = fitting(2_600, n_ctx=1024, model=Unmeasured)
    assert plan.gpus_missing
    assert settings.placements
    assert plan.places == Unmeasured(settings, 2_600 * MIB, 64_000 * MIB).plan(1024).places


def test_then_layers_leave_the_gpu(
    fitting: Callable[..., tuple[ModelSettings, MemoryPlan]],
) -> None:
    settings, plan = fitting(2_000, n_ctx=8192)
    assert 0 < settings.n_gpu_layers < GPU_LAYERS
    assert plan.gpus[0].shortage(1024 * MIB) == 0


@pytest.mark.parametrize("fields", [{"n_gpu_layers": 99}, {"fit": False}, {"tensor_split": (1.0,)}])
def test_what_the_user_has_placed_stays_with_a_warning(
    fitting: Callable[..., tuple[ModelSettings, MemoryPlan]], fields: dict[str, Any]
) -> None:
    settings, plan = fitting(4_000, n_ctx=8192, **fields)
    assert settings == ModelSettings(path="m.gguf", n_ctx=8192, **fields)
    (warning,) = plan.warnings(8192 * MIB)
    assert warning.startswith("CUDA0 has 1,160 MiB too little; to fix it: a smaller -c")


def test_a_context_that_the_host_cannot_hold_is_refused(
    fitting: Callable[..., tuple[ModelSettings, MemoryPlan]],
) -> None:
    with pytest.raises(
        ModelError, match=r"65536 tokens need about .* MiB; try a smaller --ctx-size"
    ):
        fitting(4_000, 1_000, n_ctx=65_536, n_gpu_layers=1)


MTP = DraftSettings(draft_types=("draft-mtp",))


def fitted_ctx(settings: ModelSettings, drafts: DraftSettings = NO_DRAFTS) -> int:
    return fit_all(Resolved.from_settings(settings, drafts)).model.n_ctx


def test_a_context_that_is_left_open_leaves_room_for_drafting(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(model_path("tiny-hybrid-nextn"))
    with dry_run(Resolved.from_settings(ModelSettings(path=path), MTP)) as run:
        free = run.plan(run.n_ctx_train // 2).host.usage.total
        maximum = run.n_ctx_train
    state_host(monkeypatch, free)
    settings = ModelSettings(path=path, load_mode="none", fit_ctx=512)
    found = {n: fitted_ctx(replace(settings, n_seqs=n), MTP) for n in (1, 8)}
    assert maximum // 2 - 512 <= found[1] <= maximum // 2
    assert found[8] < found[1], "planes for each sequence"
    assert fitted_ctx(settings) > found[1]
