"""Dry runs of llama.cpp: the memory that a model requires on each device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as api

from pyctl.engine.draft.draft_settings import FEATURE_TYPES, DraftSettings
from pyctl.engine.model_settings import LOAD_MODES, ModelSettings
from pyctl.errors import ModelError
from pyctl.llama import breakdown
from pyctl.llama.breakdown import ALL_GPUS, Parts, layer_of, parts_of
from pyctl.llama.devices import devices, host_available, tensor_bytes
from pyctl.llama.draft.draft_file import check_target
from pyctl.llama.library import captured_log, forget_log_errors, last_log_error
from pyctl.llama.memory_plan import MemoryPlan, Place, Usage
from pyctl.llama.params import (
    ModelParams,
    check_head,
    context_params,
    draft_cells,
    finds,
    head_params,
    metadata_text,
    uses_own_head,
)

__all__ = ["NO_DRAFTS", "DryRun", "dry_run"]

HOST = "host"

SAMPLE_CELLS = 16_384
"""Context for measuring the size of a row: some devices pad each tensor."""


class DryRun:
    """A model without weights; ``n_layers`` and ``n_ctx_train`` are the file's, ``tensors`` bytes
    by name.

    ``drafts`` are its draft settings; ``is_head``: it drafts with its trunk. ``draft_file`` is its
    draft model. ``vision`` is the device of the vision encoder, empty for the CPU, and its bytes.
    """

    def __init__(
        self,
        model: Any,
        settings: ModelSettings,
        drafts: DraftSettings,
        draft_file: DryRun | None = None,
        *,
        is_head: bool = False,
        vision: tuple[str, int] | None = None,
    ) -> None:
        self._model = model
        self._vision = {} if vision is None else {vision[0] or HOST: vision[1]}
        self._settings = settings
        self._drafts = drafts
        self._draft_file = draft_file
        self._is_head = is_head
        self._gpus = tuple(device for device in devices() if device.is_gpu)
        self.n_ctx_train = int(api.llama_model_n_ctx_train(model))
        self.n_layers = int(api.llama_model_n_layer(model)) + int(
            api.llama_model_n_layer_nextn(model)
        )
        n_used = self.n_layers if is_head else int(api.llama_model_n_layer(model))
        sizes = tensor_bytes(Path(settings.path))
        self.tensors: Mapping[str, int] = {
            name: size for name, size in sizes.items() if layer_of(name) < n_used
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
        ctx = self._context(context_params(self._settings, SAMPLE_CELLS))
        try:
            places = tuple(map(self._place_of, breakdown.core.row_places(ctx)))
            rows = self._parts(ctx)[1]
            n_cells = int(api.llama_n_ctx(ctx))
        finally:
            api.llama_free(ctx)
        if not places:
            raise ModelError("this model has no single cache of K and V")
        if len(set(places)) > 1 or ALL_GPUS in places:
            raise ModelError(f"K and V are on several devices: {', '.join(sorted(set(places)))}")
        return places, sum(rows.values()) / n_cells

    def metadata(self, key: str) -> str:
        """Return the value of ``key`` in the model's file as text; empty if there is none."""
        return metadata_text(self._model, key)

    def plan(self, n_ctx: int, n_rows: int = 0) -> MemoryPlan:
        """Return the memory for a context of ``n_ctx`` tokens and a draft model's of ``n_rows``, by
        default as many.

        Raises ModelError if llama.cpp refuses the context.
        """
        n_seqs = self._settings.n_seqs
        ctx = self._context(context_params(self._settings, n_ctx, drafts=self._drafts))
        try:
            weights, kv, states, compute = self._parts(ctx)
            n_cells = int(api.llama_n_ctx(ctx))
            n_states = int(api.llama_n_rs_seq(ctx)) + 1
            drafts = self._draft_model(ctx, n_rows or n_cells)
        finally:
            api.llama_free(ctx)
        states = {place: size // n_states for place, size in states.items()}
        # A mark is a state like a plane, one per sequence.
        n_earlier = n_states - 1 + finds(self._drafts) if states else 0
        planes = {place: size * n_earlier for place, size in states.items()}
        state_bytes = sum(states.values()) // n_seqs
        remote = {device.name for device in self._gpus if device.is_remote}
        if breakdown.core is not None and not {HOST, *remote} & {*kv, *states}:
            # The extension copies a state within each GPU before it copies it to the host.
            states = {place: size + size // n_seqs for place, size in states.items()}
        free = {device.name: device.free for device in self._gpus}
        places = []
        parts = (weights, kv, states, compute, planes, drafts, self._vision)
        for name in (*free, HOST):
            usage = Usage(*(part.get(name, 0) for part in parts))
            if usage.total or name == HOST:
                places.append(
                    Place(
                        name, name != HOST, usage, free[name] if name != HOST else host_available()
                    )
                )
        row_bytes = sum(kv.values()) / n_cells
        return MemoryPlan(
            n_cells,
            n_seqs,
            row_bytes,
            state_bytes,
            tuple(places),
            self.layers,
            n_earlier,
            n_ctx_train=self.n_ctx_train,
            is_estimate=breakdown.core is None,
        )

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

    def _parts(self, ctx: Any) -> list[dict[str, int]]:
        """Return the bytes of weights, K and V, states and compute buffers by place, without places
        that have none.
        """
        parts: list[dict[str, int]] = [{}, {}, {}, {}]
        for name, sizes in parts_of(ctx, self._settings, self.tensors).items():
            place = self._place_of(name)
            spread = self._spread(sizes) if place == ALL_GPUS else {place: sizes}
            for place, own in spread.items():
                for part, size in zip(parts, own, strict=True):
                    if size:
                        part[place] = part.get(place, 0) + size
        return parts

    def _draft_model(self, trunk: Any, n_ctx: int) -> dict[str, int]:
        """Return the bytes by place of the draft model or head for the context ``trunk``."""
        if self._draft_file is not None and not self._draft_file._is_head:
            plan = self._draft_file.plan(draft_cells(self._settings, self._drafts, n_ctx))
            # It marks the state before drafting: one more per sequence.
            return {place.name: place.usage.total + place.usage.states for place in plan.places}
        drafter = self._draft_file or self
        if not drafter._is_head:
            return {}
        ctx = drafter._context(head_params(self._settings, self._drafts, trunk, n_ctx))
        parts = drafter._parts(ctx)
        api.llama_free(ctx)
        if drafter is self:
            del parts[0]  # its weights are the trunk's
        return {place: sum(part.get(place, 0) for part in parts) for place in {*chain(*parts)}}

    def _place_of(self, name: str) -> str:
        """Return the place for llama.cpp's name of a device or buffer type."""
        if name.split("(")[0] == ALL_GPUS:
            return ALL_GPUS
        return next((gpu.name for gpu in self._gpus if name in (gpu.name, gpu.buffer_name)), HOST)

    def _spread(self, sizes: Parts) -> dict[str, Parts]:
        """Return by GPU what all have together, by --tensor-split, or evenly.

        States count on the GPU that has the most of them, buffers on each.
        """
        gpus = [
            gpu.name
            for gpu in self._gpus
            if not self._settings.devices or gpu.name in self._settings.devices
        ]
        split = (*self._settings.tensor_split, *(0.0,) * len(gpus))[: len(gpus)]
        if not any(split):
            split = (1.0,) * len(gpus)
        wholes = (
            (sum(split),) * 4
            if breakdown.core is None
            else (sum(split), sum(split), max(split), 0.0)
        )
        return {
            name: [
                int(size * share / whole) if whole else size
                for size, whole in zip(sizes, wholes, strict=True)
            ]
            for name, share in zip(gpus, split, strict=True)
        }


NO_DRAFTS: DraftSettings = DraftSettings()


@contextmanager
def dry_run(
    settings: ModelSettings,
    drafts: DraftSettings = NO_DRAFTS,
    vision: tuple[str, int] | None = None,
) -> Iterator[DryRun]:
    """Open the model of ``settings`` and its draft model without weights. Raises ModelError as
    loading would.
    """
    with ExitStack() as stack:
        draft_file = None
        if drafts.draft_path and drafts.n_draft > 0:
            of_file = drafts.of_file(settings)
            model = stack.enter_context(
                _without_weights(of_file, with_head=drafts.has("draft-mtp"))
            )
            draft_file = DryRun(model, of_file, NO_DRAFTS, is_head=drafts.reads_rows)
        is_head = uses_own_head(drafts)
        model = stack.enter_context(_without_weights(settings, with_head=is_head))
        if draft_file is not None and drafts.has(*FEATURE_TYPES):  # llama.cpp would end the process
            check_target(Path(drafts.draft_path), model)
        yield DryRun(model, settings, drafts, draft_file, is_head=is_head, vision=vision)


@contextmanager
def _without_weights(settings: ModelSettings, *, with_head: bool) -> Iterator[Any]:
    """Yield a llama_model without weights and texts of tokens."""
    params = ModelParams(settings, with_head=with_head, with_vocabulary=False)
    # releases before 0.3.35 would map the file
    params.struct.no_alloc = True
    params.struct.use_mmap = False
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
