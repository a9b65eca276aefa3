"""Dry runs of llama.cpp: the memory that a model requires on each device, as numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeAlias

from pyctl.errors import ModelError
from pyctl.llama.draft.draft_file import DraftFile, check_draft
from pyctl.llama.fit import breakdown
from pyctl.llama.fit.breakdown import ALL_GPUS
from pyctl.llama.fit.context_fit import ContextRange, fitting_context, known_sum
from pyctl.llama.fit.empty_model import EmptyModel, empty_model
from pyctl.llama.fit.layer_fit import CpuShare, LayerSizes
from pyctl.llama.fit.places import HOST, ByPlace, MemoryPlaces, UsageByPlace
from pyctl.llama.library.devices import devices, host_available
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.memory_plan import MIB, MemoryPlan
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.params import draft_cells
from pyctl.llama.settings.resolved import Resolved

__all__ = ["DryRun", "Measured", "MemoryMeter", "PooledLayers", "dry_run", "placed"]

SAMPLE_CELLS = 16_384
"""Context for measuring the size of a row: some devices pad each tensor."""


class PooledLayers(NamedTuple):
    """The layers whose K and V a pool holds.

    Attributes:
        place: The place of all of them.
        n_layers: Their number.
        row_bytes: The bytes of one token in all of them.
    """

    place: str
    n_layers: int
    row_bytes: float


class DryRun:
    """The memory of a model as a function of the size of its context.

    It owns the contexts without memory by which llama.cpp counts, and returns plain numbers.
    """

    def __init__(
        self,
        model: EmptyModel,
        places: MemoryPlaces,
        drafter: Drafter | None,
        *,
        n_seqs: int,
        marks_states: bool,
        vision: ByPlace,
    ) -> None:
        """Measure ``model`` for ``n_seqs`` sequences, with its ``drafter``.

        ``marks_states``: the extension keeps one more state of a sequence, for drafts that are
        longer than its earlier states. ``vision`` is the memory of the vision encoder.
        """
        self._model = model
        self._places = places
        self._drafter = drafter
        self._n_seqs = n_seqs
        self._marks_states = marks_states
        self._vision = vision
        self.n_ctx_train = model.n_ctx_train
        self.n_layers = model.n_layers
        self.tensors = model.tensors

    def metadata(self, key: str) -> str:
        """Return the value of ``key`` in the model's file as text; empty if there is none."""
        return self._model.metadata(key)

    def pooled_layers(self) -> PooledLayers:
        """Return the layers with K and V. Raises ModelError if a pool cannot hold them."""
        if any("rope_factors_long" in name for name in self.tensors):
            raise ModelError("this model's positions depend on the size of the context")
        if breakdown.core is None:
            raise ModelError("it needs the extension")
        with self._model.context(SAMPLE_CELLS) as ctx:
            places = tuple(map(self._places.name_of, breakdown.core.row_places(ctx)))
            cost = self._model.cost(ctx)
        if not places:
            raise ModelError("this model has no single cache of K and V")
        if len(set(places)) > 1 or ALL_GPUS in places:
            raise ModelError(f"K and V are on several devices: {', '.join(sorted(set(places)))}")
        row_bytes = self._places.usage(cost.parts).kv.total() / cost.n_cells
        return PooledLayers(places[0], len(places), row_bytes)

    def plan(self, n_ctx: int, n_rows: int = 0) -> MemoryPlan:
        """Return the memory for a context of ``n_ctx`` tokens and a draft model's of ``n_rows``, by
        default as many.

        Raises ModelError if llama.cpp refuses the context.
        """
        with self._model.context(n_ctx) as ctx:
            cost = self._model.cost(ctx)
            drafts: ByPlace = Counter()
            if self._drafter is not None:
                drafts = self._drafter.usage(ctx, n_rows or cost.n_cells)
        usage = self._places.usage(cost.parts)
        n_seqs = self._n_seqs
        n_states = cost.n_states
        last_states = Counter({place: size // n_states for place, size in usage.states.items()})
        # A mark is a state like an earlier one, one per sequence, which the extension allocates.
        n_earlier = n_states - 1 + self._marks_states if last_states else 0
        states = last_states
        # A state passes through a stage on its GPU on its way to the host (csrc/device/transfer.h).
        if breakdown.core is not None and self._places.are_all_local_gpus(usage):
            largest = breakdown.core.MAX_STAGE_BYTES
            stages = {place: min(size // n_seqs, largest) for place, size in last_states.items()}
            states = last_states + Counter(stages)
        earlier_states = {place: size * n_earlier for place, size in last_states.items()}
        in_all = UsageByPlace(
            weights=usage.weights,
            kv=usage.kv,
            states=states,
            compute=usage.compute,
            state_history=Counter(earlier_states),
            drafts=drafts,
            vision=self._vision,
        )
        return MemoryPlan(
            cost.n_cells,
            n_seqs,
            usage.kv.total() / cost.n_cells,
            last_states.total() // n_seqs,
            tuple(self._places.in_use(in_all)),
            self._model.layer_devices,
            n_earlier,
            n_ctx_train=self.n_ctx_train,
            is_estimate=breakdown.core is None,
            n_layer_bytes=self._model.layer_bytes,
            n_draft_layer_bytes=self._drafter.layer_bytes if self._drafter is not None else 0,
        )


@dataclass(frozen=True)
class HeadDrafter:
    """A draft head, whose context reads the context of its trunk.

    Attributes:
        settings: The settings of the head's context.
        model: The model that has the head.
        places: The memories over which that model is spread.
        is_own: Whether it is the trunk's own file, whose weights count there.
    """

    settings: Resolved
    model: EmptyModel
    places: MemoryPlaces
    is_own: bool

    @property
    def layer_bytes(self) -> int:
        """The average bytes of the weights of a layer of the draft file, 0 without one."""
        return 0 if self.is_own else self.model.layer_bytes

    def usage(self, trunk: Any, n_ctx: int) -> ByPlace:
        """Return the memory of the head for ``n_ctx`` tokens of the context ``trunk``."""
        with self.model.head_context(self.settings, trunk, n_ctx) as ctx:
            usage = self.places.usage(self.model.cost(ctx).parts)
        own = usage.kv + usage.states + usage.compute
        return own if self.is_own else own + usage.weights


@dataclass(frozen=True)
class ModelDrafter:
    """A separate draft model.

    Attributes:
        run: The dry run of the draft model.
        n_more_cells: The cells that it has in addition to the model's.
        layer_bytes: The average bytes of the weights of a layer.
    """

    run: DryRun
    n_more_cells: int
    layer_bytes: int

    def usage(self, _trunk: Any, n_ctx: int) -> ByPlace:
        """Return the memory of the draft model for ``n_ctx`` tokens of the model."""
        plan = self.run.plan(n_ctx + self.n_more_cells)
        # It marks the state before drafting: one more per sequence.
        return Counter({each.name: each.usage.total + each.usage.states for each in plan.places})


Drafter: TypeAlias = HeadDrafter | ModelDrafter


@contextmanager
def dry_run(resolved: Resolved, vision: tuple[str, int] | None = None) -> Iterator[DryRun]:
    """Open the model of ``resolved`` and its draft model without weights.

    ``vision`` is the device of the vision encoder, empty for the CPU, and its bytes. Raises
    ModelError as loading would.
    """
    drafts = resolved.drafts
    encoder: ByPlace = Counter()
    if vision is not None:
        device, n_bytes = vision
        encoder[device or HOST] = n_bytes
    with ExitStack() as stack:
        draft_model = None
        if drafts.uses_file:
            opened = empty_model(resolved.draft_file, with_head=drafts.has("draft-mtp"))
            draft_model = stack.enter_context(opened)
        model = stack.enter_context(empty_model(resolved, with_head=drafts.uses_own_head))
        if drafts.uses_file or drafts.uses_own_head:
            # Before a context is opened, in which llama.cpp would end the process.
            drafting = draft_model or model
            file = DraftFile(drafting.path, drafting.file_head, drafting.handle)
            check_draft(drafts, file, model.handle)
        yield DryRun(
            model,
            _places_of(resolved),
            _drafter(resolved, model, draft_model),
            n_seqs=resolved.model.n_seqs,
            marks_states=drafts.drafts_from_text,
            vision=encoder,
        )


def _drafter(
    resolved: Resolved, model: EmptyModel, draft_model: EmptyModel | None
) -> Drafter | None:
    """Return the drafter of ``resolved`` for ``model``, None without one; ``draft_model`` is its
    file's.
    """
    drafts = resolved.drafts
    if draft_model is None:
        if not drafts.uses_own_head:
            return None
        return HeadDrafter(resolved.head, model, _places_of(resolved), is_own=True)
    places = _places_of(resolved.draft_file)
    if drafts.reads_rows:
        return HeadDrafter(resolved.head, draft_model, places, is_own=False)
    n_seqs = resolved.model.n_seqs
    run = DryRun(draft_model, places, None, n_seqs=n_seqs, marks_states=False, vision=Counter())
    return ModelDrafter(run, draft_cells(resolved, 0), draft_model.layer_bytes)


def _places_of(resolved: Resolved) -> MemoryPlaces:
    """Return the memories of this machine at this moment, for the model of ``resolved``."""
    settings = resolved.model
    names = [gpu.name for gpu in resolved.gpus]
    given = settings.tensor_split[: len(names)]
    shares = dict.fromkeys(names, 1.0)
    if any(given):
        shares = dict(zip(names, chain(given, repeat(0.0)), strict=False))
    return MemoryPlaces(
        gpus=tuple(device for device in devices() if device.is_gpu),
        host_free=host_available(),
        shares=shares,
        margins=[margin * MIB for margin in settings.fit_target],
        is_mapped=settings.load_mode in ("auto", "mmap"),
        is_estimate=breakdown.core is None,
    )


class Measured(NamedTuple):
    """A model in memory, with the largest context that fits.

    Attributes:
        plan: Its memory.
        n_ctx_train: The tokens of the model's own context.
        sizes: The bytes of its layers.
    """

    plan: MemoryPlan
    n_ctx_train: int
    sizes: LayerSizes


class MemoryMeter:
    """The memory of a model as a function of its drafts and of the layers on the CPU.

    Attributes:
        resolved: The settings of the model.
        vision: The device of the vision encoder, empty for the CPU, and its bytes; None without
            one.
    """

    def __init__(self, resolved: Resolved, vision: tuple[str, int] | None = None) -> None:
        self.resolved = resolved
        self.vision = vision

    def dry_run(self) -> AbstractContextManager[DryRun]:
        """Open the model with its settings as they are. Raises ModelError as loading would."""
        return dry_run(self.resolved, self.vision)

    def measure(self, drafts: DraftSettings, share: CpuShare) -> Measured:
        """Return the memory with ``drafts`` and ``share`` on the CPU, and with the largest context
        that fits.

        Raises ModelError if the context is refused, or larger than all memory.
        """
        settings = placed(self.resolved.model, share)
        with dry_run(replace(self.resolved, model=settings, drafts=drafts), self.vision) as run:
            contexts = ContextRange(
                given=settings.n_ctx,
                n_ctx_train=run.n_ctx_train,
                least=settings.fit_ctx,
                can_reduce=settings.fit,
                memory_bytes=known_sum(device.free for device in devices()),
            )
            plan = fitting_context(run.plan, contexts)
            sizes = LayerSizes.from_tensors(run.tensors, run.n_layers)
        return Measured(plan, contexts.n_ctx_train, sizes)


def placed(settings: ModelSettings, share: CpuShare) -> ModelSettings:
    """Return the settings with ``share`` on the CPU."""
    if share.n_experts:
        settings = replace(settings, placements=share.placements)
    if share.n_layers:
        settings = replace(settings, n_gpu_layers=share.n_gpu_layers)
    return settings
