"""What a model will take on each device, by a dry run of llama.cpp, and settings made to fit into what is free."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as api

from pyctl.engine.draft.draft_settings import DraftSettings
from pyctl.engine.llama.devices import devices, host_available, tensor_bytes
from pyctl.engine.llama.library import captured_log, last_log_error
from pyctl.engine.llama.memory import MIB, MemoryPlan, Place, Usage
from pyctl.engine.llama.params import (
    ModelParams,
    check_head,
    context_params,
    draft_cells,
    finds,
    head_params,
    uses_own_head,
)
from pyctl.engine.model_settings import CPU_EXPERTS, LOAD_MODES, ModelSettings, experts_on_cpu
from pyctl.errors import ModelError

__all__ = ["DryRun", "dry_run", "fit_settings"]

HOST = "host"

ALL_GPUS = "Meta"
"""How llama.cpp calls what --split-mode tensor makes of them; their names follow in parentheses."""

LAYER = re.compile(r"load_tensors: layer +(\d+) assigned to device ([^ ,]+)")

UNUSED = re.compile(r"model has unused tensor (\S+) ")

KV_LAYER = re.compile(r"llama_kv_cache\w*: layer +\d+: dev = (\S+)")

KV_SIZE = re.compile(r"llama_kv_cache\w*: size = +([\d.]+) MiB \( *(\d+) cells")

STATES = re.compile(r"(\S+) RS buffer size = +([\d.]+) MiB")

SAMPLE_CELLS = 16_384
"""Of a context that is asked for the size of a row, which llama.cpp tells in hundredths of a MiB of all of them."""

COMPUTE = re.compile(r"(\S+) compute buffer size = +([\d.]+) MiB")


class DryRun:
    """A model without weights; ``n_layers`` and ``n_ctx_train`` are the file's, ``tensors`` bytes by name.

    ``drafts`` say what it shall take back; with ``is_head`` its head drafts. ``draft_file`` is another such model that
    drafts for this one. ``vision`` is where an encoder of images is, empty for the CPU, and its bytes.
    """

    def __init__(
        self,
        model: Any,
        settings: ModelSettings,
        log: list[str],
        drafts: DraftSettings,
        draft_file: DryRun | None = None,
        *,
        is_head: bool = False,
        vision: tuple[str, int] | None = None,
    ) -> None:
        self._model = model
        self._vision = {} if vision is None else {vision[0] or HOST: vision[1]}
        self._settings, self._drafts = settings, drafts
        self._draft_file, self._is_head = draft_file, is_head
        self._gpus = tuple(device for device in devices() if device.is_gpu)
        self.n_ctx_train = int(api.llama_model_n_ctx_train(model))
        self.n_layers = int(api.llama_model_n_layer(model)) + int(api.llama_model_n_layer_nextn(model))
        ignored = {match[1] for line in log if (match := UNUSED.search(line))}
        sizes = tensor_bytes(Path(settings.path))
        self.tensors: Mapping[str, int] = {name: size for name, size in sizes.items() if name not in ignored}
        layers = {int(m[1]): m[2] for line in log if (m := LAYER.search(line))}
        self.layers = tuple(layers[index] for index in sorted(layers))
        self._weights = self._weights_by_place(layers)

    def pooled_layers(self) -> tuple[tuple[str, ...], float]:
        """The places of the layers that have K and V, in their order, and bytes of both of one token in all of them.

        ModelError says why a pool cannot hold them.
        """
        if any("rope_factors_long" in name for name in self.tensors):
            raise ModelError("this model's positions depend on the size of the context")
        with captured_log() as log:
            ctx = api.llama_init_from_model(self._model, context_params(self._settings, SAMPLE_CELLS))
        if not ctx:
            raise ModelError(f"cannot make the context: {last_log_error('llama.cpp gave no reason')}")
        api.llama_free(ctx)
        places = tuple(self._place_of(match[1]) for line in log if (match := KV_LAYER.search(line)))
        sizes = [(float(match[1]) * MIB, int(match[2])) for line in log if (match := KV_SIZE.search(line))]
        if not places or len(sizes) != 1:
            raise ModelError("this model has not one cache of K and V")
        if len(set(places)) > 1:
            raise ModelError(f"K and V are on several devices: {', '.join(sorted(set(places)))}")
        return places, sizes[0][0] / sizes[0][1]

    def plan(self, n_ctx: int, n_rows: int = 0) -> MemoryPlan:
        """The memory for a context of ``n_ctx`` tokens, and for what drafts for one of ``n_rows``, by default as many.

        Raises ModelError if no such context can be made.
        """
        n_seqs = self._settings.n_seqs
        ctx, kv, states, compute = self._context(context_params(self._settings, n_ctx, drafts=self._drafts))
        try:
            n_cells, n_states = int(api.llama_n_ctx(ctx)), int(api.llama_n_rs_seq(ctx)) + 1
            drafts = self._draft_model(ctx, n_rows or n_cells)
        finally:
            api.llama_free(ctx)
        states = {place: size // n_states for place, size in states.items()}
        # A mark is a state as a plane is, one for each sequence.
        n_earlier = n_states - 1 + finds(self._drafts) if states else 0
        planes = {place: size * n_earlier for place, size in states.items()}
        state_bytes = sum(states.values()) // n_seqs
        if not {HOST, ALL_GPUS} & {*kv, *states}:
            # The extension copies a state within each GPU before it copies it to the host.
            states = {place: size + size // n_seqs for place, size in states.items()}
        free = {device.name: device.free for device in self._gpus}
        places = []
        parts = [self._spread(part) for part in (self._weights, kv, states, compute, planes, drafts, self._vision)]
        for name in (*free, HOST):
            usage = Usage(*(part.get(name, 0) for part in parts))
            if usage.total or name == HOST:
                places.append(Place(name, name != HOST, usage, free[name] if name != HOST else host_available()))
        row_bytes = sum(kv.values()) / n_cells
        return MemoryPlan(n_cells, n_seqs, row_bytes, state_bytes, tuple(places), self.layers, n_earlier)

    def _context(self, params: Any) -> tuple[Any, dict[str, int], dict[str, int], dict[str, int]]:
        """A context without memory, and the bytes of K and V, states and computing that it would take by place."""
        with captured_log() as log:
            ctx = api.llama_init_from_model(self._model, params)
        if not ctx:
            raise ModelError(f"cannot make the context: {last_log_error('llama.cpp gave no reason')}")
        return ctx, self._kv_by_place(log), self._sum_by_place(STATES, log), self._sum_by_place(COMPUTE, log)

    def _draft_model(self, trunk: Any, n_ctx: int) -> dict[str, int]:
        """Bytes by place of what drafts for the context ``trunk``."""
        if self._draft_file is not None and not self._draft_file._is_head:
            plan = self._draft_file.plan(draft_cells(self._settings, self._drafts, n_ctx))
            # It marks the state that it drafts from: one more for each sequence.
            return {place.name: place.usage.total + place.usage.states for place in plan.places}
        drafter = self._draft_file or self
        if not drafter._is_head:
            return {}
        ctx, *parts = drafter._context(head_params(self._settings, self._drafts, trunk, n_ctx))
        api.llama_free(ctx)
        if drafter is not self:
            parts.append(drafter._weights)
        return {place: sum(part.get(place, 0) for part in parts) for place in {*chain(*parts)}}

    def _place_of(self, name: str) -> str:
        """Where something is that llama.cpp says to be on a device or in a buffer type called ``name``."""
        if name.startswith(f"{ALL_GPUS}("):
            return ALL_GPUS
        return next((gpu.name for gpu in self._gpus if name in (gpu.name, gpu.buffer_name)), HOST)

    def _spread(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The bytes by place, those that all GPUs share as --tensor-split says, or evenly."""
        shared = sizes.get(ALL_GPUS, 0)
        found = {place: size for place, size in sizes.items() if place != ALL_GPUS}
        gpus = [gpu.name for gpu in self._gpus if not self._settings.devices or gpu.name in self._settings.devices]
        split = (*self._settings.tensor_split, *(0.0,) * len(gpus))[: len(gpus)]
        if not any(split):
            split = (1.0,) * len(gpus)
        for name, share in zip(gpus, split, strict=True):
            found[name] = found.get(name, 0) + int(shared * share / sum(split))
        return found

    def _weights_by_place(self, layers: Mapping[int, str]) -> dict[str, int]:
        """Bytes of weights by place. The last of ``layers`` is the output; what is in no layer is on the host."""
        output = self._place_of(layers[max(layers)]) if layers else HOST
        sums: dict[str, int] = {}
        for name, size in self.tensors.items():
            layer = re.match(r"blk\.(\d+)\.", name)
            if layer is not None:
                place = self._place_of(layers.get(int(layer[1]), HOST))
            else:
                place = output if name.startswith(("output", "cls")) else HOST
            for pattern, buffer in self._settings.placements:
                if re.search(pattern, name):
                    place = self._place_of(buffer)
                    break
            sums[place] = sums.get(place, 0) + size
        if "output.weight" not in self.tensors and output != HOST:
            # The embeddings serve as output, too, and are there twice.
            sums[output] = sums.get(output, 0) + self.tensors.get("token_embd.weight", 0)
        return sums

    def _kv_by_place(self, log: list[str]) -> dict[str, int]:
        """Bytes of K and V by place: each cache is spread evenly over its layers."""
        sums: dict[str, int] = {}
        layers: list[str] = []
        for line in log:
            if match := KV_LAYER.search(line):
                layers.append(self._place_of(match[1]))
            elif match := KV_SIZE.search(line):
                for place in layers:
                    sums[place] = sums.get(place, 0) + int(float(match[1]) * MIB / len(layers))
                layers = []
        return sums

    def _sum_by_place(self, pattern: re.Pattern[str], log: list[str]) -> dict[str, int]:
        sums: dict[str, int] = {}
        for line in log:
            if match := pattern.search(line):
                place = self._place_of(match[1])
                sums[place] = sums.get(place, 0) + int(float(match[2]) * MIB)
        return sums


NO_DRAFTS = DraftSettings()


@contextmanager
def dry_run(
    settings: ModelSettings, drafts: DraftSettings = NO_DRAFTS, vision: tuple[str, int] | None = None
) -> Iterator[DryRun]:
    """The model of ``settings``, and what drafts for it, without weights. Raises ModelError as loading them would."""
    with ExitStack() as stack:
        draft_file = None
        if drafts.draft_path and drafts.n_draft > 0:
            is_head = drafts.has("draft-mtp")
            of_file = drafts.of_file(settings)
            model, log = stack.enter_context(_without_weights(of_file, with_head=is_head))
            draft_file = DryRun(model, of_file, log, NO_DRAFTS, is_head=is_head)
        is_head = uses_own_head(drafts)
        model, log = stack.enter_context(_without_weights(settings, with_head=is_head))
        yield DryRun(model, settings, log, drafts, draft_file, is_head=is_head, vision=vision)


@contextmanager
def _without_weights(settings: ModelSettings, *, with_head: bool) -> Iterator[tuple[Any, list[str]]]:
    """A llama_model, and what llama.cpp said when it made it."""
    params = ModelParams(settings, with_head=with_head)
    params.struct.no_alloc = True
    params.struct.load_mode = LOAD_MODES["none"]
    with captured_log() as log:
        model = api.llama_model_load_from_file(settings.path.encode(), params.struct)
    if not model:
        raise ModelError(f"cannot load the model {settings.path}: {last_log_error('llama.cpp gave no reason')}")
    try:
        if with_head:
            check_head(model, settings.path)
        yield model, log
    finally:
        with captured_log():
            api.llama_model_free(model)


log = logging.getLogger(__name__)

CTX_STEP = 256

"""llama.cpp rounds contexts up to this."""

EXPERTS = re.compile(CPU_EXPERTS)

ATTEMPTS = 4


def fit_settings(
    settings: ModelSettings, drafts: DraftSettings = NO_DRAFTS, vision: tuple[str, int] | None = None
) -> tuple[ModelSettings, MemoryPlan]:
    """The settings with what was left open filled in, and the memory that they will take with ``drafts``.

    ``vision`` is the device of an encoder of images, empty for the CPU, and its bytes.

    Raises ModelError when the context cannot fit at all.
    """
    movable = settings.fit and settings.n_gpu_layers == -1 and not settings.tensor_split
    movable = movable and settings.split_mode != "tensor"  # all layers are on all GPUs
    placed = bool(settings.placements)
    for _ in range(ATTEMPTS):
        with dry_run(settings, drafts, vision) as run:
            plan = _fit_context(run, settings)
            missing = gpu_shortage(settings, plan)
            if not (missing and movable):
                break
            settings = _move_to_cpu(run, settings, plan, missing, experts=not placed)
    if plan.n_ctx < (settings.n_ctx or run.n_ctx_train):
        log.warning("the context is cut from %d to %d tokens to fit into memory (-c)", run.n_ctx_train, plan.n_ctx)
    if not placed and settings.placements:
        log.warning("the experts of %d layers stay on the CPU (--n-cpu-moe)", len(settings.placements))
    if movable and settings.n_gpu_layers >= 0:
        log.warning("%d of %d layers go to the GPU (-ngl)", max(settings.n_gpu_layers - 1, 0), run.n_layers)
    needed = plan.host.usage.total - (plan.host.usage.weights if _is_mapped(settings) else 0)
    if shortage(settings, plan.host):
        raise ModelError(refusal(plan.n_ctx, needed, plan.host.free or 0))
    split = settings.tensor_split or _split_of(plan.layers, settings)
    return replace(settings, n_ctx=plan.n_ctx, tensor_split=split), plan


def _split_of(layers: Sequence[str], settings: ModelSettings) -> tuple[float, ...]:
    """Shares that put each layer where it was in the dry run. Left open, the split would follow what is free at the
    moment, and what is saved would mean another thing after each start. Empty where nothing is split by layers.
    """
    names = settings.devices or tuple(device.name for device in devices() if device.is_gpu)
    counts = tuple(float(sum(layer == name for layer in layers)) for name in names)
    return counts if settings.split_mode == "layer" and len(counts) > 1 and all(counts) else ()


def _fit_context(run: DryRun, settings: ModelSettings) -> MemoryPlan:
    """With the context that was asked for, else with the largest up to the model's own that fits."""
    most = settings.n_ctx or run.n_ctx_train
    if most > run.n_ctx_train:
        # Even a dry run keeps books about every cell, so what is out of all reason is not tried.
        low = run.plan(min(settings.fit_ctx, most))
        free = sum(place.free or 0 for place in low.places)
        if None not in (place.free for place in low.places) and low.row_bytes * most > free:
            raise ModelError(refusal(most, int(low.row_bytes * most), free))
    plan = run.plan(most)
    least = min(settings.fit_ctx, most)
    fits = not (gpu_shortage(settings, plan) or shortage(settings, plan.host))
    if fits or settings.n_ctx or not settings.fit or least == most:
        return plan
    # Every part of it grows in a straight line with the context.
    low = run.plan(least)
    n_ctx = most
    for index, (before, after) in enumerate(zip(low.places, plan.places, strict=True)):
        per_token = (after.usage.total - before.usage.total) / (most - least)
        if excess := shortage(settings, after, index):
            n_ctx = min(n_ctx, most - int(excess / per_token) - 1 if per_token > 0 else least)
    return run.plan(max(n_ctx // CTX_STEP * CTX_STEP, least))


def _move_to_cpu(
    run: DryRun, settings: ModelSettings, plan: MemoryPlan, missing: int, *, experts: bool
) -> ModelSettings:
    """With more weights on the CPU, so that ``missing`` bytes of GPU memory become free: experts if there are any."""
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
    """What is said of a context that does not fit."""
    return (
        f"cannot make the context: {n_ctx} tokens need about {needed // MIB:,} MiB of memory and "
        f"{free // MIB:,} MiB are free; try a smaller --ctx-size"
    )


def _by_layer(run: DryRun, wanted: re.Pattern[str]) -> list[int]:
    """Bytes of the tensors in each layer whose names match ``wanted``."""
    sums = [0] * run.n_layers
    for name, size in run.tensors.items():
        layer = re.match(r"blk\.(\d+)\.", name)
        if layer is not None and int(layer[1]) < run.n_layers and wanted.search(name):
            sums[int(layer[1])] += size
    return sums


def _count_to_free(sizes: Sequence[int], missing: int) -> int:
    """How many of ``sizes``, from the first on, make up for ``missing``; all of them if none do."""
    total = 0
    for count, size in enumerate(sizes, 1):
        total += size
        if total >= missing:
            return count
    return len(sizes)


def gpu_shortage(settings: ModelSettings, plan: MemoryPlan) -> int:
    """Bytes that the GPUs lack."""
    return sum(shortage(settings, place, index) for index, place in enumerate(plan.gpus))


def shortage(settings: ModelSettings, place: Place, index: int = 0) -> int:
    """Bytes that ``place`` lacks; GPU number ``index`` keeps its margin."""
    if not place.is_gpu:
        return place.shortage(mapped=_is_mapped(settings))
    margins = settings.fit_target
    return place.shortage(margins[min(index, len(margins) - 1)] * MIB)


def _is_mapped(settings: ModelSettings) -> bool:
    return settings.load_mode in ("auto", "mmap")
