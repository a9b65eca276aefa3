"""Dry runs of llama.cpp: the memory that a model requires on each device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from pyctl.errors import ModelError
from pyctl.llama.draft.draft_file import check_target
from pyctl.llama.fit import breakdown
from pyctl.llama.fit.breakdown import ALL_GPUS, Parts, layer_of, parts_of
from pyctl.llama.library.bindings import api
from pyctl.llama.library.devices import devices, host_available, metadata_text
from pyctl.llama.library.library_log import captured_log, forget_log_errors, last_log_error
from pyctl.llama.settings.draft_settings import FEATURE_TYPES
from pyctl.llama.settings.memory_plan import MIB, MemoryPlan, Place, Usage
from pyctl.llama.settings.model_settings import LOAD_MODES, ModelSettings
from pyctl.llama.settings.params import (
    ModelParams,
    check_head,
    context_params,
    draft_cells,
    head_params,
    layer_bytes,
)
from pyctl.llama.settings.resolved import Resolved

__all__ = ["CTX_STEP", "DryRun", "dry_run", "plan_fitting", "plan_whole", "refusal"]

CTX_STEP = 256
"""llama.cpp rounds contexts up to this."""

HOST = "host"

SAMPLE_CELLS = 16_384
"""Context for measuring the size of a row: some devices pad each tensor."""

ByPlace: TypeAlias = Counter[str]
"""Bytes by the name of a GPU, or of the host; places that have none are missing."""


class ContextUsage(NamedTuple):
    """The memory of one context by place."""

    weights: ByPlace
    kv: ByPlace
    states: ByPlace
    compute: ByPlace

    def add(self, place: str, sizes: Parts) -> None:
        """Count ``sizes`` at ``place``."""
        for part, size in zip(self, sizes, strict=True):
            if size:
                part[place] += size


class DryRun:
    """A model without weights; ``n_layers`` and ``n_ctx_train`` are the file's, ``tensors`` bytes
    by name.

    ``draft_file`` is its draft model. ``is_head``: it drafts with its trunk. ``vision`` is the
    device of the vision encoder, empty for the CPU, and its bytes.
    """

    def __init__(
        self,
        model: Any,
        resolved: Resolved,
        draft_file: DryRun | None = None,
        *,
        is_head: bool = False,
        vision: tuple[str, int] | None = None,
    ) -> None:
        """Read the sizes of ``model``, which has no weights, and the free memory of all GPUs at
        this moment.
        """
        self._model = model
        self._resolved = resolved
        self._draft_file = draft_file
        self._is_head = is_head
        self._vision: ByPlace = Counter()
        if vision is not None:
            device, n_bytes = vision
            self._vision[device or HOST] = n_bytes
        # The free memory of all GPUs at this moment: tensors may be placed on one that is not used.
        self._gpus = tuple(device for device in devices() if device.is_gpu)
        self.n_ctx_train = int(api.llama_model_n_ctx_train(model))
        n_own_layers = int(api.llama_model_n_layer(model))
        self.n_layers = n_own_layers + int(api.llama_model_n_layer_nextn(model))
        n_used = self.n_layers if is_head else n_own_layers
        self.tensors: Mapping[str, int] = {
            name: size for name, size in resolved.tensors.items() if layer_of(name) < n_used
        }
        core = breakdown.core
        self.layers: tuple[str, ...] = () if core is None else tuple(core.layer_devices(model))

    def pooled_layers(self) -> tuple[tuple[str, ...], float]:
        """Return the places of the layers with K and V in order, and the bytes of one token in all
        of them.

        Raises ModelError if a pool cannot hold them.
        """
        if any("rope_factors_long" in name for name in self.tensors):
            raise ModelError("this model's positions depend on the size of the context")
        if breakdown.core is None:
            raise ModelError("it needs the extension")
        ctx = self._context(context_params(self._resolved, SAMPLE_CELLS))
        try:
            places = tuple(map(self._place_of, breakdown.core.row_places(ctx)))
            rows = self._usage(ctx).kv
            n_cells = int(api.llama_n_ctx(ctx))
        finally:
            api.llama_free(ctx)
        if not places:
            raise ModelError("this model has no single cache of K and V")
        if len(set(places)) > 1 or ALL_GPUS in places:
            raise ModelError(f"K and V are on several devices: {', '.join(sorted(set(places)))}")
        return places, rows.total() / n_cells

    def metadata(self, key: str) -> str:
        """Return the value of ``key`` in the model's file as text; empty if there is none."""
        return metadata_text(self._model, key)

    def plan(self, n_ctx: int, n_rows: int = 0) -> MemoryPlan:
        """Return the memory for a context of ``n_ctx`` tokens and a draft model's of ``n_rows``, by
        default as many.

        Raises ModelError if llama.cpp refuses the context.
        """
        ctx = self._context(context_params(self._resolved, n_ctx))
        try:
            usage = self._usage(ctx)
            n_cells = int(api.llama_n_ctx(ctx))
            # llama_memory_recurrent allocates the last state and the earlier ones of a sequence
            # side by side.
            n_states = int(api.llama_n_rs_seq(ctx)) + 1
            drafts = self._draft_usage(ctx, n_rows or n_cells)
        finally:
            api.llama_free(ctx)
        n_seqs = self._resolved.model.n_seqs
        last_states = Counter({place: size // n_states for place, size in usage.states.items()})
        state_bytes = last_states.total() // n_seqs
        n_earlier = self._n_earlier_states(n_states) if last_states else 0
        planes = Counter({place: size * n_earlier for place, size in last_states.items()})
        states = last_states
        if self._copies_states_on_gpus(usage):
            copies = Counter({place: size // n_seqs for place, size in last_states.items()})
            states = last_states + copies
        parts = {
            "weights": usage.weights,
            "kv": usage.kv,
            "states": states,
            "compute": usage.compute,
            "planes": planes,
            "drafts": drafts,
            "vision": self._vision,
        }
        return MemoryPlan(
            n_cells,
            n_seqs,
            usage.kv.total() / n_cells,
            state_bytes,
            tuple(self._places(parts)),
            self.layers,
            n_earlier,
            n_ctx_train=self.n_ctx_train,
            is_estimate=breakdown.core is None,
            n_layer_bytes=layer_bytes(self._model),
            n_draft_layer_bytes=self._draft_layer_bytes,
        )

    def _n_earlier_states(self, n_states: int) -> int:
        """Return the states of a sequence besides the last: planes, and a mark."""
        # A mark is a state like a plane, one per sequence, which the extension allocates.
        return n_states - 1 + self._marks_states

    @property
    def _marks_states(self) -> bool:
        """Return whether the extension marks states, for drafts that are longer than the planes."""
        return self._resolved.drafts.uses_texts and not self._resolved.is_draft

    def _copies_states_on_gpus(self, usage: ContextUsage) -> bool:
        """Return whether the extension copies a state within each GPU before it copies it to the
        host.
        """
        if breakdown.core is None:
            return False
        elsewhere = {HOST, *(device.name for device in self._gpus if device.is_remote)}
        return not elsewhere & {*usage.kv, *usage.states}

    def _places(self, parts: Mapping[str, ByPlace]) -> Iterator[Place]:
        """Yield the places with memory of ``parts``, by the names of `Usage`; the host last."""
        settings = self._resolved.model
        # The last margin of --fit-target holds for all further GPUs.
        margins = chain(settings.fit_target, repeat(settings.fit_target[-1]))
        for gpu in self._gpus:
            usage = _usage_at(gpu.name, parts)
            if usage.total:
                margin = next(margins) * MIB
                yield Place(gpu.name, True, usage, gpu.free, margin=margin)
        is_mapped = settings.load_mode in ("auto", "mmap")
        yield Place(HOST, False, _usage_at(HOST, parts), host_available(), is_mapped=is_mapped)

    def _context(self, params: Any) -> Any:
        """Return a context without memory. Raises ModelError if llama.cpp refuses it."""
        forget_log_errors()
        with captured_log():
            ctx = api.llama_init_from_model(self._model, params)
        if not ctx:
            raise ModelError(
                f"cannot make the context: {last_log_error('llama.cpp gave no reason')}"
            )
        return ctx

    def _usage(self, ctx: Any) -> ContextUsage:
        """Return the memory of ``ctx`` by place."""
        usage = ContextUsage(Counter(), Counter(), Counter(), Counter())
        for name, sizes in parts_of(ctx, self._resolved, self.tensors).items():
            place = self._place_of(name)
            if place == ALL_GPUS:
                self._spread(sizes, usage)
            else:
                usage.add(place, sizes)
        return usage

    @property
    def _draft_layer_bytes(self) -> int:
        """Average bytes of the weights of a layer of the draft file, 0 without one."""
        return layer_bytes(self._draft_file._model) if self._draft_file is not None else 0

    def _draft_usage(self, trunk: Any, n_ctx: int) -> ByPlace:
        """Return the memory of the draft model or head for the context ``trunk``."""
        if self._draft_file is not None and not self._draft_file._is_head:
            plan = self._draft_file.plan(draft_cells(self._resolved, n_ctx))
            # It marks the state before drafting: one more per sequence.
            totals = {place.name: place.usage.total + place.usage.states for place in plan.places}
            return Counter(totals)
        drafter = self._draft_file or self
        if not drafter._is_head:
            return Counter()
        ctx = drafter._context(head_params(self._resolved.head, trunk, n_ctx))
        usage = drafter._usage(ctx)
        api.llama_free(ctx)
        own = usage.kv + usage.states + usage.compute
        # The weights of a head in the model's own file are its trunk's.
        return own if drafter is self else own + usage.weights

    def _place_of(self, name: str) -> str:
        """Return the place for llama.cpp's name of a device or buffer type."""
        if name.split("(")[0] == ALL_GPUS:
            return ALL_GPUS
        return next((gpu.name for gpu in self._gpus if name in (gpu.name, gpu.buffer_name)), HOST)

    def _spread(self, sizes: Parts, usage: ContextUsage) -> None:
        """Count in ``usage`` what all GPUs have together, by --tensor-split, or evenly.

        States count on the GPU that has the most of them, buffers on each.
        """
        shares = self._shares()
        weights, kv, states, compute = sizes
        whole = sum(shares.values())
        largest = max(shares.values())
        for gpu, share in shares.items():
            own = [weights * share / whole, kv * share / whole]
            if breakdown.core is None:  # an estimate has states and buffers of all GPUs together
                own += [states * share / whole, compute * share / whole]
            else:
                own += [states * share / largest, compute]
            usage.add(gpu, [int(size) for size in own])

    def _shares(self) -> dict[str, float]:
        """Return the shares of the GPUs in use: --tensor-split, or even ones."""
        names = [gpu.name for gpu in self._resolved.gpus]
        given = self._resolved.model.tensor_split[: len(names)]
        if not any(given):
            return dict.fromkeys(names, 1.0)
        return dict(zip(names, chain(given, repeat(0.0)), strict=False))


def _usage_at(place: str, parts: Mapping[str, ByPlace]) -> Usage:
    """Return the memory of ``parts`` at ``place``, by the names of `Usage`."""
    return Usage(**{name: sizes[place] for name, sizes in parts.items()})


def plan_fitting(run: DryRun, settings: ModelSettings) -> MemoryPlan:
    """Return the plan with the requested context, else with the largest that fits, up to the
    model's own.
    """
    maximum = settings.n_ctx or run.n_ctx_train
    minimum = min(settings.fit_ctx, maximum)
    plan = plan_whole(run, settings, [device.free for device in devices()])
    can_reduce = settings.fit and not settings.n_ctx and minimum < maximum
    if not can_reduce or plan.fits:
        return plan
    # Every part grows linearly with the context.
    low = run.plan(minimum)
    n_ctx = maximum
    for before, after in zip(low.places, plan.places, strict=True):
        if not after.missing:
            continue
        per_token = (after.usage.total - before.usage.total) / (maximum - minimum)
        fitting = maximum - int(after.missing / per_token) - 1 if per_token > 0 else minimum
        n_ctx = min(n_ctx, fitting)
    return run.plan(max(n_ctx // CTX_STEP * CTX_STEP, minimum))


def plan_whole(run: DryRun, settings: ModelSettings, memory: Sequence[int | None]) -> MemoryPlan:
    """Return the plan with the whole context that is asked for, by default the model's own.

    Raises ModelError if its rows are larger than all ``memory`` (bytes by device, None if unknown).
    """
    maximum = settings.n_ctx or run.n_ctx_train
    if maximum > run.n_ctx_train and None not in memory:
        # Even a dry run allocates data per cell, so far too large contexts are refused first.
        needed = run.plan(min(settings.fit_ctx, maximum)).row_bytes * maximum
        max_bytes = sum(filter(None, memory))
        if needed > max_bytes:
            raise ModelError(refusal(maximum, int(needed), max_bytes))
    return run.plan(maximum)


def refusal(n_ctx: int, needed: int, free: int) -> str:
    """Return the error message for a context that does not fit."""
    return (
        f"cannot make the context: {n_ctx} tokens need about {needed // MIB:,} MiB of memory and "
        f"there are {free // MIB:,} MiB; try a smaller --ctx-size"
    )


@contextmanager
def dry_run(resolved: Resolved, vision: tuple[str, int] | None = None) -> Iterator[DryRun]:
    """Open the model of ``resolved`` and its draft model without weights. Raises ModelError as
    loading would.
    """
    drafts = resolved.drafts
    with ExitStack() as stack:
        draft_file = None
        if drafts.uses_file:
            draft = resolved.draft_file
            draft_model = stack.enter_context(
                _without_weights(draft.model, with_head=drafts.has("draft-mtp"))
            )
            draft_file = DryRun(draft_model, draft, is_head=drafts.reads_rows)
        is_head = drafts.uses_own_head
        model = stack.enter_context(_without_weights(resolved.model, with_head=is_head))
        if draft_file is not None and drafts.has(*FEATURE_TYPES):  # llama.cpp would end the process
            check_target(Path(drafts.draft_path), model)
        yield DryRun(model, resolved, draft_file, is_head=is_head, vision=vision)


@contextmanager
def _without_weights(settings: ModelSettings, *, with_head: bool) -> Iterator[Any]:
    """Yield a llama_model without weights and texts of tokens."""
    params = ModelParams(settings, with_head=with_head, with_vocabulary=False)
    params.struct.no_alloc = True
    params.struct.use_mmap = False  # releases before 0.3.35 would map the file
    params.struct.load_mode = LOAD_MODES["none"]
    with captured_log():
        model = params.load(settings.path)
    try:
        if with_head:
            check_head(model, None, settings.path)
        yield model
    finally:
        with captured_log():
            api.llama_model_free(model)
