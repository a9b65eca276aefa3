"""Fitting of settings into free memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from pyctl.errors import ModelError
from pyctl.llama.draft.draft_file import count_heads
from pyctl.llama.fit.breakdown import layer_of
from pyctl.llama.fit.dry_runs import DryRun, dry_run, plan_fitting, refusal
from pyctl.llama.library.devices import devices
from pyctl.llama.settings.draft_settings import PRIVATE, DraftSettings
from pyctl.llama.settings.memory_plan import MemoryPlan
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.placements import CPU_EXPERTS, experts_on_cpu
from pyctl.llama.settings.resolved import Resolved

__all__ = [
    "DRAFT_CTX",
    "fit_drafts",
    "fit_settings",
    "split_of",
]

log = logging.getLogger(__name__)

EXPERTS = re.compile(CPU_EXPERTS)

BLOCKS = re.compile("^blk")

ATTEMPTS = 4
"""Dry runs, each with more weights on the CPU than the last."""

DRAFT_CTX = 65_536
"""Minimum context with drafts that no flag selects: coding agents work in less, but not well."""


def fit_settings(resolved: Resolved, vision: tuple[str, int] | None = None) -> Resolved:
    """Return the settings with the context and the layers on GPUs that fit, and with their plan.

    ``vision`` is the device of the vision encoder, empty for the CPU, and its bytes. A plan that
    `fit_drafts` has found to fit is used. Raises ModelError if the context cannot fit.
    """
    settings = resolved.model
    plan = resolved.plan
    if plan is None:
        settings, plan = _fit_layers(resolved, vision)
    if plan.n_ctx < (settings.n_ctx or plan.n_ctx_train):
        log.warning(
            "context reduced from %d to %d tokens to fit into memory (-c)",
            plan.n_ctx_train,
            plan.n_ctx,
        )
    if plan.host.missing:
        mapped = plan.host.usage.weights if plan.host.is_mapped else 0
        needed = plan.host.usage.total - mapped
        raise ModelError(refusal(plan.n_ctx, needed, plan.host.free or 0))
    # llama.cpp's default split depends on the free memory, and would change the fingerprint at each
    # start.
    split = settings.tensor_split or split_of(plan.layers, settings)
    return resolved.fitted(replace(settings, tensor_split=split), plan)


def _fit_layers(
    resolved: Resolved, vision: tuple[str, int] | None
) -> tuple[ModelSettings, MemoryPlan]:
    """Return the settings with as many weights on GPUs as fit with the context, and their
    memory.
    """
    given = settings = resolved.model
    can_move = given.fit and given.n_gpu_layers == -1 and not given.tensor_split
    # With parts of tensors on each GPU all layers are on all GPUs.
    can_move = can_move and given.split_mode != "tensor"
    for _ in range(ATTEMPTS):
        with dry_run(replace(resolved, model=settings), vision) as run:
            plan = plan_fitting(run, settings)
            n_layers = run.n_layers
            if not (plan.gpus_missing and can_move):
                break
            settings = _move_to_cpu(run, settings, plan, experts=not given.placements)
    if settings.placements != given.placements:
        log.warning(
            "experts of %d layers kept on the CPU to fit into memory (--n-cpu-moe)",
            len(settings.placements),
        )
    if settings.n_gpu_layers != given.n_gpu_layers:
        log.warning(
            "%d of %d layers placed on the GPU to fit into memory (-ngl)",
            max(settings.n_gpu_layers - 1, 0),
            n_layers,
        )
    return settings, plan


def fit_drafts(resolved: Resolved, vision: tuple[str, int] | None = None) -> Resolved:
    """Return the settings with automatic drafts as the head's in the model's file and `cache`'s, or
    none, and with the plan of all if they fit; other drafts unchanged.

    Drafts need memory, all layers on GPUs, and then room for the given context, without -c for
    `DRAFT_CTX` tokens. Each drafted token takes a state of each sequence; a draft of one is tried
    if longer ones take too much.
    """
    if not resolved.drafts.is_automatic:
        return resolved
    drafts, plan, reason = _choose_drafts(resolved, vision)
    return replace(resolved.with_drafts(drafts, reason), plan=plan)


def _choose_drafts(
    resolved: Resolved, vision: tuple[str, int] | None
) -> tuple[DraftSettings, MemoryPlan | None, str]:
    """Return the best drafts that memory allows, the plan with them, and the reason for them."""
    none = replace(resolved.drafts, draft_types=())
    if not resolved.gpus:
        return none, None, "automatic drafts need a GPU"
    lacking = ""
    for drafts in _possible_drafts(resolved):
        tried = replace(resolved, drafts=drafts)
        try:
            with dry_run(tried, vision) as run:
                plan = plan_fitting(run, tried.model)
        except ModelError as error:
            lacking = str(error)  # such as no memory for the states, which even a dry run allocates
            continue
        if plan.host.usage.kv or plan.host.usage.states:
            return none, None, "automatic drafts need all of K and V on GPUs"
        minimum = resolved.model.n_ctx or min(DRAFT_CTX, run.n_ctx_train)
        if _has_room_for_drafts(tried, plan, minimum):
            _note_drafts(drafts)
            return drafts, plan, "automatic, as memory allows"
        lacking = (
            f"{minimum:,} tokens of context do not fit with them; -np 1 or -ctk q8_0 -ctv "
            "q8_0 makes room"
        )
    if lacking:
        log.info("no drafts by default: %s", lacking)
    return none, None, lacking or "the model has no head"


def _has_room_for_drafts(tried: Resolved, plan: MemoryPlan, minimum: int) -> bool:
    """Return whether ``plan`` fits into memory with ``minimum`` tokens of context."""
    # `cache` alone takes outputs and no states, so that it may come with a reduced context.
    is_small = tried.drafts.draft_types == ("cache",) and not plan.n_planes
    has_context = plan.n_ctx >= minimum or (is_small and not tried.model.n_ctx)
    return has_context and plan.fits


def _note_drafts(drafts: DraftSettings) -> None:
    names = ",".join(drafts.draft_types)
    length = ""
    if drafts.has("draft-mtp"):
        length = f"; the model's head drafts up to {drafts.n_draft} tokens a step"
    log.info("drafts by default: --spec-type %s, none turns them off%s", names, length)


def _possible_drafts(resolved: Resolved) -> Iterator[DraftSettings]:
    """Yield what may draft by default, the best first.

    Each drafted token of a head takes a state of each sequence, and so does the mark of longer
    drafts.
    """
    drafts = resolved.drafts
    texts = () if drafts.draft_types == PRIVATE else ("cache",)
    if not drafts.n_draft:
        return
    if count_heads(resolved.path) == 1:
        for n_draft in sorted({drafts.n_draft, 1}, reverse=True):
            for also in dict.fromkeys((texts, ())):
                yield replace(drafts, draft_types=("draft-mtp", *also), n_draft=n_draft)
    if texts:
        yield replace(drafts, draft_types=texts)


def split_of(layers: Sequence[str], settings: ModelSettings) -> tuple[float, ...]:
    """Return the shares that reproduce the dry run's assignment of layers; empty without a split by
    layers.
    """
    if settings.split_mode != "layer":
        return ()
    names = settings.devices or tuple(device.name for device in devices() if device.is_gpu)
    counts = tuple(float(sum(layer == name for layer in layers)) for name in names)
    return counts if len(counts) > 1 and all(counts) else ()


def _move_to_cpu(
    run: DryRun, settings: ModelSettings, plan: MemoryPlan, *, experts: bool
) -> ModelSettings:
    """Return the settings with more weights on the CPU, so that the GPUs lack none: experts if
    possible.
    """
    missing = plan.gpus_missing
    if experts:
        sizes = _by_layer(run, EXPERTS)
        n = len(settings.placements)
        if sum(sizes[n:]) >= missing:
            n += _count_to_free(sizes[n:], missing)
            return replace(settings, placements=experts_on_cpu(n))
    kept = sum(place.usage.kv + place.usage.states + place.usage.planes for place in plan.gpus)
    share = kept // run.n_layers
    # The last of N layers on the GPU is the output.
    n = 0 if settings.n_gpu_layers < 0 else run.n_layers + 1 - settings.n_gpu_layers
    sizes = [size + share for size in _by_layer(run, BLOCKS)]
    n += _count_to_free(sizes[n:], missing)
    return replace(settings, n_gpu_layers=run.n_layers + 1 - n)


def _by_layer(run: DryRun, wanted: re.Pattern[str]) -> list[int]:
    """Return for each layer the bytes of the tensors whose names match ``wanted``."""
    sums = [0] * run.n_layers
    for name, size in run.tensors.items():
        layer = layer_of(name)
        if 0 <= layer < run.n_layers and wanted.search(name):
            sums[layer] += size
    return sums


def _count_to_free(sizes: Sequence[int], missing: int) -> int:
    """Return the least number of leading ``sizes`` that sum to ``missing``, or all."""
    return next((n for n, total in enumerate(accumulate(sizes), 1) if total >= missing), len(sizes))
