"""Settings that fit into free memory: a meter measures, `draft_fit`, `layer_fit` and `context_fit`
choose, and the choices become settings here.
"""

from __future__ import annotations

import logging

from pyctl.llama.fit.context_fit import check_host
from pyctl.llama.fit.draft_fit import DraftChoice, choose_drafts
from pyctl.llama.fit.dry_runs import MemoryMeter, placed
from pyctl.llama.fit.layer_fit import CpuShare
from pyctl.llama.fit.pool_fit import pool_plan
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.memory_plan import MemoryPlan
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.llama.settings.resolved import Resolved

__all__ = ["fit_all"]

log = logging.getLogger(__name__)

ATTEMPTS = 4
"""Moves of weights to the CPU; a dry run measures each."""


def fit_all(
    resolved: Resolved,
    vision: tuple[str, int] | None = None,
    pool: PoolSettings | None = None,
) -> Resolved:
    """Return the settings that fit into memory, with their plan: with a ``pool`` if one is
    possible, else with automatic drafts and as many layers on GPUs as fit.

    ``vision`` is the device of the vision encoder, empty for the CPU, and its bytes. Raises
    ModelError if the context cannot fit, or if ``pool`` excludes another setting.
    """
    meter = MemoryMeter(resolved, vision)
    if pool is not None:
        plan = pool_plan(meter, pool)
        if plan is not None:
            return resolved.fitted(resolved.model, plan)
    return _fit_parts(meter)


def _fit_parts(meter: MemoryMeter) -> Resolved:
    """Return the settings with the context, the layers on GPUs and the automatic drafts that fit,
    and with their plan.
    """
    resolved = meter.resolved
    given = resolved.model
    choice = DraftChoice(resolved.drafts, "given")
    if choice.drafts.is_automatic:
        choice = choose_drafts(meter)
    if choice.note:
        log.info("%s", choice.note)
    plan = choice.plan
    settings = given
    if plan is None:
        settings, plan = _fit_layers(meter, choice.drafts)
    if plan.n_ctx < (given.n_ctx or plan.n_ctx_train):
        log.warning(
            "context reduced from %d to %d tokens to fit into memory (-c)",
            plan.n_ctx_train,
            plan.n_ctx,
        )
    check_host(plan)
    fitted = resolved.fitted(settings, plan)
    if choice.drafts == resolved.drafts:
        return fitted
    return fitted.with_drafts(choice.drafts, choice.reason)


def _fit_layers(meter: MemoryMeter, drafts: DraftSettings) -> tuple[ModelSettings, MemoryPlan]:
    """Return the settings with as many weights on GPUs as fit with the context, and their
    memory.
    """
    given = meter.resolved.model
    can_move = given.fit and given.n_gpu_layers == -1 and not given.tensor_split
    # With parts of tensors on each GPU all layers are on all GPUs.
    can_move = can_move and given.split_mode != "tensor"
    can_move_experts = not given.placements
    share = CpuShare()
    plan, _, sizes = meter.measure(drafts, share)
    for _ in range(ATTEMPTS):
        if not (plan.gpus_missing and can_move):
            break
        rows = sum(
            place.usage.kv + place.usage.states + place.usage.state_history for place in plan.gpus
        )
        share = share.freeing(plan.gpus_missing, sizes, rows, can_move_experts=can_move_experts)
        plan, _, sizes = meter.measure(drafts, share)
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
