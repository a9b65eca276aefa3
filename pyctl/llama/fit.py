"""Fitting of settings into free memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from pyctl.engine.draft.draft_settings import PRIVATE, DraftSettings
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.placements import CPU_EXPERTS, experts_on_cpu
from pyctl.errors import ModelError
from pyctl.llama.breakdown import layer_of
from pyctl.llama.devices import devices
from pyctl.llama.draft.draft_file import count_heads
from pyctl.llama.dry_runs import NO_DRAFTS, DryRun, dry_run
from pyctl.llama.memory_plan import MIB, MemoryPlan, Place
from pyctl.llama.params import gpus

__all__ = [
    "CTX_STEP",
    "DRAFT_CTX",
    "fit_drafts",
    "fit_settings",
    "gpu_shortage",
    "plan_whole",
    "refusal",
    "shortage",
]

log = logging.getLogger(__name__)

CTX_STEP = 256
"""llama.cpp rounds contexts up to this."""

EXPERTS = re.compile(CPU_EXPERTS)

ATTEMPTS = 4

DRAFT_CTX = 65_536
"""Least context with drafts that no flag selects: coding agents work in less, but not well."""


def fit_settings(
    settings: ModelSettings,
    drafts: DraftSettings = NO_DRAFTS,
    vision: tuple[str, int] | None = None,
    plan: MemoryPlan | None = None,
) -> tuple[ModelSettings, MemoryPlan]:
    """Return the settings with automatic values filled in, and their memory including ``drafts``.

    ``vision`` is the device of the vision encoder, empty for the CPU, and its bytes. ``plan`` is
    what `fit_drafts` has found to fit. Raises ModelError if the context cannot fit.
    """
    movable = settings.fit and settings.n_gpu_layers == -1 and not settings.tensor_split
    movable = movable and settings.split_mode != "tensor"  # all layers are on all GPUs
    placed = bool(settings.placements)
    n_layers = 0
    for _ in range(ATTEMPTS if plan is None else 0):
        with dry_run(settings, drafts, vision) as run:
            plan = _fit_context(run, settings)
            n_layers = run.n_layers
            missing = gpu_shortage(settings, plan)
            if not (missing and movable):
                break
            settings = _move_to_cpu(run, settings, plan, missing, experts=not placed)
    assert plan is not None
    if plan.n_ctx < (settings.n_ctx or plan.n_ctx_train):
        log.warning(
            "context reduced from %d to %d tokens to fit into memory (-c)",
            plan.n_ctx_train,
            plan.n_ctx,
        )
    if not placed and settings.placements:
        log.warning(
            "experts of %d layers kept on the CPU to fit into memory (--n-cpu-moe)",
            len(settings.placements),
        )
    if movable and settings.n_gpu_layers >= 0:
        log.warning(
            "%d of %d layers placed on the GPU to fit into memory (-ngl)",
            max(settings.n_gpu_layers - 1, 0),
            n_layers,
        )
    needed = plan.host.usage.total - (plan.host.usage.weights if _is_mapped(settings) else 0)
    if shortage(settings, plan.host):
        raise ModelError(refusal(plan.n_ctx, needed, plan.host.free or 0))
    split = settings.tensor_split or split_of(plan.layers, settings)
    return replace(settings, n_ctx=plan.n_ctx, tensor_split=split), plan


def fit_drafts(
    settings: ModelSettings, drafts: DraftSettings, vision: tuple[str, int] | None = None
) -> tuple[DraftSettings, MemoryPlan | None]:
    """Return automatic ``drafts`` as the head's in the model's file and `cache`'s, with the plan of
    all, or none; others unchanged.

    They need memory, all layers on GPUs, and then room for the given context, without -c for
    `DRAFT_CTX` tokens. Each drafted token takes a state of each sequence; a draft of one is tried
    if longer ones take too much.
    """
    if not drafts.is_automatic:
        return drafts, None
    none = replace(drafts, draft_types=())
    lacking = ""
    for tried in _possible_drafts(settings, drafts) if gpus(settings) else ():
        try:
            with dry_run(settings, tried, vision) as run:
                plan = _fit_context(run, settings)
                minimum = settings.n_ctx or min(DRAFT_CTX, run.n_ctx_train)
        except (
            ModelError
        ) as error:  # such as no memory for the states, which even a dry run allocates
            lacking = str(error)
            continue
        if plan.host.usage.kv or plan.host.usage.states:
            return none, None
        is_small = tried.draft_types == ("cache",) and not plan.n_planes  # outputs alone
        enough = plan.n_ctx >= minimum or (is_small and not settings.n_ctx)
        if enough and not (gpu_shortage(settings, plan) or shortage(settings, plan.host)):
            names = ",".join(tried.draft_types)
            length = f"; the model's head drafts up to {tried.n_draft} tokens a step" * tried.has(
                "draft-mtp"
            )
            log.info("drafts by default: --spec-type %s, none turns them off%s", names, length)
            return tried, plan
        lacking = (
            f"{minimum:,} tokens of context do not fit with them; -np 1 or -ctk q8_0 -ctv "
            "q8_0 makes room"
        )
    if lacking:
        log.info("no drafts by default: %s", lacking)
    return none, None


def _possible_drafts(settings: ModelSettings, drafts: DraftSettings) -> Iterator[DraftSettings]:
    """Return what may draft by default, the best first.

    Each drafted token of a head takes a state of each sequence, and so does the mark of longer
    drafts.
    """
    texts = () if drafts.draft_types == PRIVATE else ("cache",)
    if not drafts.n_draft:
        return
    if count_heads(Path(settings.path)) == 1:
        for n_draft in sorted({drafts.n_draft, 1}, reverse=True):
            for also in dict.fromkeys((texts, ())):
                yield replace(drafts, draft_types=("draft-mtp", *also), n_draft=n_draft)
    if texts:
        yield replace(drafts, draft_types=texts)


def split_of(layers: Sequence[str], settings: ModelSettings) -> tuple[float, ...]:
    """Return the shares that reproduce the dry run's assignment of layers; empty without a split by
    layers.
    """
    # llama.cpp's default split depends on the free memory, and would change the fingerprint at each
    # start.
    names = settings.devices or tuple(device.name for device in devices() if device.is_gpu)
    counts = tuple(float(sum(layer == name for layer in layers)) for name in names)
    return counts if settings.split_mode == "layer" and len(counts) > 1 and all(counts) else ()


def _fit_context(run: DryRun, settings: ModelSettings) -> MemoryPlan:
    """Return the plan with the requested context, else with the largest that fits, up to the
    model's own.
    """
    maximum = settings.n_ctx or run.n_ctx_train
    plan = plan_whole(run, settings, [device.free for device in devices()])
    minimum = min(settings.fit_ctx, maximum)
    fits = not (gpu_shortage(settings, plan) or shortage(settings, plan.host))
    if fits or settings.n_ctx or not settings.fit or minimum == maximum:
        return plan
    # Every part grows linearly with the context.
    low = run.plan(minimum)
    n_ctx = maximum
    for index, (before, after) in enumerate(zip(low.places, plan.places, strict=True)):
        per_token = (after.usage.total - before.usage.total) / (maximum - minimum)
        if excess := shortage(settings, after, index):
            n_ctx = min(n_ctx, maximum - int(excess / per_token) - 1 if per_token > 0 else minimum)
    return run.plan(max(n_ctx // CTX_STEP * CTX_STEP, minimum))


def plan_whole(run: DryRun, settings: ModelSettings, memory: Sequence[int | None]) -> MemoryPlan:
    """Return the plan with the whole context that is asked for, by default the model's own.

    Raises ModelError if its rows are larger than all ``memory`` (bytes by device, None if unknown).
    """
    maximum = settings.n_ctx or run.n_ctx_train
    if maximum > run.n_ctx_train and None not in memory:
        # Even a dry run allocates data per cell, so far too large contexts are refused first.
        needed = run.plan(min(settings.fit_ctx, maximum)).row_bytes * maximum
        if needed > (max_bytes := sum(filter(None, memory))):
            raise ModelError(refusal(maximum, int(needed), max_bytes))
    return run.plan(maximum)


def _move_to_cpu(
    run: DryRun, settings: ModelSettings, plan: MemoryPlan, missing: int, *, experts: bool
) -> ModelSettings:
    """Return settings with more weights on the CPU to free ``missing`` bytes of GPU memory: experts
    if possible.
    """
    if experts:
        found = _by_layer(run, EXPERTS)
        n = len(settings.placements)
        if sum(found[n:]) >= missing:
            n += _count_to_free(found[n:], missing)
            return replace(settings, placements=experts_on_cpu(n))
    kept = sum(place.usage.kv + place.usage.states + place.usage.planes for place in plan.gpus)
    share = kept // run.n_layers
    # The last of N layers on the GPU is the output.
    n = 0 if settings.n_gpu_layers < 0 else run.n_layers + 1 - settings.n_gpu_layers
    n += _count_to_free([size + share for size in _by_layer(run, re.compile("^blk"))[n:]], missing)
    return replace(settings, n_gpu_layers=run.n_layers + 1 - n)


def refusal(n_ctx: int, needed: int, free: int) -> str:
    """Return the error message for a context that does not fit."""
    return (
        f"cannot make the context: {n_ctx} tokens need about {needed // MIB:,} MiB of memory and "
        "there "
        f"are {free // MIB:,} MiB; try a smaller --ctx-size"
    )


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


def gpu_shortage(settings: ModelSettings, plan: MemoryPlan) -> int:
    """Return the bytes that the GPUs lack."""
    return sum(shortage(settings, place, index) for index, place in enumerate(plan.gpus))


def shortage(settings: ModelSettings, place: Place, index: int = 0) -> int:
    """Return the bytes that ``place`` lacks, with the --fit-target margin of GPU ``index``."""
    if not place.is_gpu:
        return place.shortage(mapped=_is_mapped(settings))
    margins = settings.fit_target
    return place.shortage(margins[min(index, len(margins) - 1)] * MIB)


def _is_mapped(settings: ModelSettings) -> bool:
    return settings.load_mode in ("auto", "mmap")
