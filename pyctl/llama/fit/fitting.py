"""Settings that fit into free memory: a meter measures, `draft_fit`, `layer_fit` and `context_fit`
choose, and the choices become settings here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from pyctl.errors import ModelError
from pyctl.llama.fit.context_fit import check_host
from pyctl.llama.fit.draft_fit import DraftChoice, choose_drafts
from pyctl.llama.fit.dry_runs import MemoryMeter, placed
from pyctl.llama.fit.layer_fit import CpuShare
from pyctl.llama.fit.pool_fit import pool_plan
from pyctl.llama.library.devices import count_heads, devices
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.memory_plan import MemoryPlan
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.llama.settings.resolved import Resolved

__all__ = ["fit_all", "fit_settings", "layer_shares"]

log = logging.getLogger(__name__)

ATTEMPTS = 4
"""Dry runs, each with more weights on the CPU than the last."""


def fit_all(
    resolved: Resolved, vision: tuple[str, int] | None, pool: PoolSettings | None
) -> Resolved:
    """Return the settings that fit into memory: with a ``pool`` if one is possible, else with
    automatic drafts and as many layers on GPUs as fit.

    ``vision`` is the device of the vision encoder, empty for the CPU, and its bytes. Raises
    ModelError if the context cannot fit, or if ``pool`` excludes another setting.
    """
    plan = pool_plan(resolved, pool) if pool is not None else None
    if plan is None:
        return fit_settings(resolved, vision)
    if vision is not None:
        raise ModelError("--kv-pool excludes --mmproj: a pool holds no rows of images")
    return resolved.fitted(resolved.model, plan)


def fit_settings(resolved: Resolved, vision: tuple[str, int] | None = None) -> Resolved:
    """Return the settings with the context, the layers on GPUs and the automatic drafts that fit,
    and with their plan.

    ``vision`` is the device of the vision encoder, empty for the CPU, and its bytes. Raises
    ModelError if the context cannot fit.
    """
    given = resolved.model
    meter = MemoryMeter(resolved, vision)
    choice = DraftChoice(resolved.drafts, "given")
    if choice.drafts.is_automatic:
        choice = choose_drafts(
            meter,
            resolved.drafts,
            n_ctx=given.n_ctx,
            n_heads=count_heads(resolved.tensors),
            has_gpu=bool(resolved.gpus),
        )
    if choice.note:
        log.info("%s", choice.note)
    plan = choice.plan
    settings = given
    if plan is None:
        settings, plan = _fit_layers(meter, choice.drafts, given)
    if plan.n_ctx < (given.n_ctx or plan.n_ctx_train):
        log.warning(
            "context reduced from %d to %d tokens to fit into memory (-c)",
            plan.n_ctx_train,
            plan.n_ctx,
        )
    mapped = plan.host.usage.weights if plan.host.is_mapped else 0
    check_host(plan, plan.host.usage.total - mapped)
    # llama.cpp's default split depends on the free memory, and would change the fingerprint at each
    # start.
    split = settings.tensor_split or layer_shares(plan.layers, settings)
    fitted = resolved.fitted(replace(settings, tensor_split=split), plan)
    if choice.drafts == resolved.drafts:
        return fitted
    return fitted.with_drafts(choice.drafts, choice.reason)


def _fit_layers(
    meter: MemoryMeter, drafts: DraftSettings, given: ModelSettings
) -> tuple[ModelSettings, MemoryPlan]:
    """Return the settings with as many weights on GPUs as fit with the context, and their
    memory.
    """
    can_move = given.fit and given.n_gpu_layers == -1 and not given.tensor_split
    # With parts of tensors on each GPU all layers are on all GPUs.
    can_move = can_move and given.split_mode != "tensor"
    can_move_experts = not given.placements
    share = CpuShare()
    for _ in range(ATTEMPTS):
        plan, _, sizes = meter.measure(drafts, share)
        if not (plan.gpus_missing and can_move):
            break
        rows = sum(
            place.usage.kv + place.usage.states + place.usage.state_history for place in plan.gpus
        )
        share = share.freeing(plan.gpus_missing, sizes, rows, can_move_experts=can_move_experts)
    _note_share(share)
    return placed(given, share), plan


def _note_share(share: CpuShare) -> None:
    """Log the experts and layers that do not fit on GPUs."""
    if share.n_experts:
        log.warning(
            "experts of %d layers kept on the CPU to fit into memory (--n-cpu-moe)",
            share.n_experts,
        )
    if share.n_layers:
        log.warning(
            "%d of %d layers placed on the GPU to fit into memory (-ngl)",
            max(share.n_gpu_layers - 1, 0),
            share.n_all,
        )


def layer_shares(layers: Sequence[str], settings: ModelSettings) -> tuple[float, ...]:
    """Return the shares that reproduce the dry run's assignment of layers; empty without a split by
    layers.
    """
    if settings.split_mode != "layer":
        return ()
    names = settings.devices or tuple(device.name for device in devices() if device.is_gpu)
    counts = tuple(float(sum(layer == name for layer in layers)) for name in names)
    return counts if len(counts) > 1 and all(counts) else ()
